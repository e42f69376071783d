"""Tests of the modules that both sides read: options, settings and units."""
