"""Requests of the launcher to training ranks, such as save, stop or pause: all ranks act after the same update."""
