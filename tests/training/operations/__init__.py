"""Tests of operations on nested tensors: of one process, and of all together."""
