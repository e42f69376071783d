"""Tests of accumulation: a room for each room there, and loops whose gradients are compared with the full batch's."""
