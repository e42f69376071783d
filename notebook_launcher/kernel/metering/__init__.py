"""The use of memory, processors and GPUs by the ranks, and the pace of training."""
