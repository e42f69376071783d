"""Batches that rank 0 reads for all ranks: counted, cut into portions and sent."""
