"""Tests of `notebook-launcher check`."""
