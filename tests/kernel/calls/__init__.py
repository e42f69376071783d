"""Tests of a run's handle."""
