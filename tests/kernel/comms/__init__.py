"""Tests of widgets that ranks make."""
