"""Tests that need GPUs, each made in a process of its own."""
