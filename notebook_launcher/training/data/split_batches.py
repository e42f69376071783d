"""The check of `split_batches`, by which every batch is cut among the ranks."""

from __future__ import annotations

__all__ = ["check_split"]


def check_split(size: int | None, num_processes: int, lacking: str) -> None:
    """Raise ValueError unless a batch can be cut into equal parts for all ranks.

    Args:
        size: Number of samples of a batch; None if that is unknown.
        num_processes: Number of ranks.
        lacking: Words that say what has no size, if it is unknown.
    """
    if size is None:
        raise ValueError(
            f"split_batches=True cuts every batch among the ranks, and their size is not known: {lacking}. Give a "
            "batch_size, or pass split_batches=False."
        )
    if size % num_processes != 0:
        raise ValueError(
            f"split_batches=True cuts every batch among {num_processes} ranks, and batch_size={size} is not a round "
            f"multiple of {num_processes}. Use batch_size={-(-size // num_processes) * num_processes}, for instance."
        )
