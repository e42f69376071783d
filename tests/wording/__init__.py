"""Tests of the wording of texts and numbers."""
