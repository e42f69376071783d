"""Tests of prepared loaders: shares, rounds, positions."""
