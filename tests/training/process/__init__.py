"""Tests of a process among its peers."""
