"""Tests of sources and needs of a notebook's functions."""
