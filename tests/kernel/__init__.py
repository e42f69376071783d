"""Tests of the launcher's side: launches, output, failures, stops and sessions, in real kernels."""
