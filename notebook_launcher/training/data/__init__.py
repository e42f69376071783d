"""Sharded data: each rank gets its part of every round, and knows how many of its samples are real."""
