"""Tests of `save_state` and `load_state`."""
