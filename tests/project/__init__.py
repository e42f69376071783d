"""Tests of the project itself: layers, packages, documentation, tutorials and the check for leaks."""
