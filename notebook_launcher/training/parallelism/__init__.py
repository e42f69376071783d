"""Models of which each rank holds a part: the mesh of ranks, and the sharding by torch's `fully_shard`."""
