"""Tests of settings: Accelerate's file, and what the ranks observe."""
