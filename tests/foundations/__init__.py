"""Tests of the modules that both sides read: options, lazy names and ranks' numbers."""
