"""Tests of run folders and of the records that views read."""
