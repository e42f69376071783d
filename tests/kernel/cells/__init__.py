"""Tests of cells that run on ranks."""
