"""Gradient accumulation: windows of micro-batches, the members that they train, and the updates that end them.

Each of these has a room. This folder itself has what a user calls beside the loop: `check_accumulation`, `LocalSGD` and
`join_uneven_inputs`.
"""
