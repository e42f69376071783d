"""Tests of checkpoints: written, complete, loaded elsewhere."""
