"""The two layouts of sharded tensors in files: whole, or each rank's parts in its own file."""
