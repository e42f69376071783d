"""Tests of prepared loaders on one process and several."""
