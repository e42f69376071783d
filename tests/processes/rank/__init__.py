"""Tests of ranks as processes: starts, forks, ends, and the code that runs in them."""
