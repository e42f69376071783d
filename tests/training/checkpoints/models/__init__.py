"""Tests of models' weights in files."""
