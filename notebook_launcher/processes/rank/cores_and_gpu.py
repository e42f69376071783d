"""A rank's threads and GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os

from notebook_launcher.processes.libraries import set_library_threads

__all__ = ["choose_gpu", "set_threads", "start_driver"]


def set_threads(num_threads: int) -> None:
    """Set the intra-op threads of torch and of each library that is loaded; later ones read the environment."""
    import torch

    torch.set_num_threads(num_threads)
    set_library_threads(num_threads)


def start_driver() -> None:
    """Initialise CUDA's driver in this process ahead: 180 ms on one machine with an H100.

    It makes no context, so it holds no memory of a GPU. The visible GPUs are settled by it.
    """
    with contextlib.suppress(OSError, AttributeError):  # AMD's driver.
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def choose_gpu(rank: int, local_rank: int) -> None:
    """Make this rank's GPU the current one.

    Raises:
        RuntimeError: torch sees no GPU in this process, though the kernel saw some.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
        raise RuntimeError(
            f"rank {rank} sees no GPU, though the driver names some to the kernel ({variable}="
            f"{os.environ.get(variable)!r} here). Does nvidia-smi work, is the driver new enough for torch "
            f"{torch.__version__}, and has the container all of /dev/nvidia*? devices='cpu' runs without GPUs."
        )
    torch.cuda.set_device(local_rank % count)
