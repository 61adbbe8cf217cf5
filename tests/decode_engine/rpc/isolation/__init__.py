"""Tests that no tenant learns of another's contexts, by whatever door or way"""
