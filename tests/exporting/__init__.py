"""Tests of scripts that are exported from a notebook."""
