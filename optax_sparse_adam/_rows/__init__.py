"""Arithmetic on a few rows of a large table."""
