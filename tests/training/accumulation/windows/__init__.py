"""Tests of windows: their ends, their weights and their corrections."""
