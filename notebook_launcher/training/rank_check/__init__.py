"""Comparison of the ranks' weights now and then, and the report of the first parameter that differs."""
