"""Models that are spread over ranks: the mesh of ranks, and the sharding by torch's `fully_shard`."""
