"""Tests of one micro-batch: its initial gradient, and reductions that end late."""
