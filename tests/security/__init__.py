"""Attacks on what a kernel reads: another user's files, damaged files, and secrets that must not be written."""
