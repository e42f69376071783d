"""Tests of the folders of checkpoints, whole at every moment."""
