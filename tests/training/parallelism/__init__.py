"""Tests of sharded models, tensor parallelism and the settings of DeepSpeed."""
