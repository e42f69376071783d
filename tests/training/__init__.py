"""Tests of the Accelerator and of what belongs to it."""
