"""Tests of the comparison of ranks."""
