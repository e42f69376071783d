"""Tests of a rank's notebook: rich output and questions."""
