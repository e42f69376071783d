"""Tests of the panel, the monitor and the comparison, without a browser."""
