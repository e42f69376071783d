"""Tests of trackers, phases and profiles."""
