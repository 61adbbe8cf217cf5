"""Contexts that share a beginning: children, which store what they add to a parent, and prefixes found by tokens"""
