"""Contexts as single files, and in object stores."""
