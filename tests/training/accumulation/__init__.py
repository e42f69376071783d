"""Tests of windows, weights, corrections and updates."""
