"""Tests of batches that rank 0 reads for all ranks."""
