"""Tests of what runs outside the kernel: the fork server, supervisors and ranks."""
