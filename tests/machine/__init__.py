"""Tests of what is found out about a machine's GPUs."""
