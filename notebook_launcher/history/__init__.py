"""What a run was: snapshots, metrics and curves as plain data, and the folders that keep them."""
