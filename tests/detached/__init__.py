"""Tests of runs that are opened from their folders."""
