"""Tests of what travels between the kernel and the ranks."""
