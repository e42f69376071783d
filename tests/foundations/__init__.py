"""Tests of the modules that both sides read: options, lazy names and units."""
