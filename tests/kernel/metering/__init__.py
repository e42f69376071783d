"""Tests of rates and meters of a run."""
