"""Failures in a rank: their reports, and their frames, kept for a debugger."""
