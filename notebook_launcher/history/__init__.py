"""Record of a run: snapshots, metrics and curves as plain data, and the folders that keep them."""
