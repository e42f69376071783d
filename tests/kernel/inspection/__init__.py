"""Tests of what a kernel finds out about its ranks from outside: stacks, hangs and mismatches."""
