"""Tests of streams of which each rank reads a part."""
