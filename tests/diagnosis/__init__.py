"""Tests of `doctor()`."""
