"""Shares of iterable data sets, which have no indices: ranks read streams and keep in step."""
