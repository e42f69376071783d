"""Tests of members: their kinds, the arguments of `accumulate`, and what a window trains."""
