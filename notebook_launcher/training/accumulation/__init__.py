"""Gradient accumulation: windows of micro-batches, the members that they train, and the updates that end them."""
