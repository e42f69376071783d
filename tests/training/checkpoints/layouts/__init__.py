"""Tests of the layouts of sharded models in checkpoints."""
