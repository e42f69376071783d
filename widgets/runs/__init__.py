"""Runs side by side: the comparison, and the table of all runs."""
