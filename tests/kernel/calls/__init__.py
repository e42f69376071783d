"""Tests of a call before its run."""
