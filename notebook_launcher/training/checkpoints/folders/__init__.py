"""Folders of checkpoints: names, files that are on the disk when a call returns, and their replacement as a whole."""
