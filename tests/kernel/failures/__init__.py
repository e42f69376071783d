"""Tests of failed launches: what a cell shows, advice, and the debugger."""
