"""Tests of the launch's output: consoles, logs, progress and pictures in a cell."""
