"""Processes outside of the kernel: fork server and supervisor; in the folders below, the ranks."""
