"""Waits for a GPU in a stack: with NCCL a rank waits for its peers there, and not in the collective, which returns.

A collective of NCCL holds up the GPU's stream. The program continues, and stops at the next line that needs a result.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CUDA_WAIT", "is_end_of_call", "waits_for_gpu"]

CUDA_WAIT = "CUDA synchronization"
SYNCHRONIZE = ("/torch/cuda/__init__.py", "/torch/cuda/streams.py")
END_OF_CALL = ("/processes/rank/cuda_work.py", "finish")
"""File and function in which a rank waits for work on the GPU after the user's function has returned."""
READERS = ("/torch/_tensor.py", "/torch/_tensor_str.py", "/torch/amp/grad_scaler.py", "/torch/nn/utils/clip_grad.py")
"""Files of torch that read numbers from a GPU: `print(loss)`, the scaler's overflow flags, the norm's check."""
READS = re.compile(r"\.(?:item|cpu|tolist|numpy|nonzero|to|synchronize)\(|\b(?:float|int|bool)\(")
"""Calls in a line of the user's that wait for the GPU before they return."""


class CodePlace(Protocol):
    """A frame of a stack, such as `StackFrame`."""

    @property
    def function(self) -> str:
        """Name of its function."""

    @property
    def file(self) -> str:
        """File of its code."""

    @property
    def source(self) -> str:
        """Its line of code."""

    @property
    def is_library(self) -> bool:
        """True if it belongs to Python or to an installed package."""


def is_end_of_call(frame: CodePlace) -> bool:
    """Return True for the launcher's own wait for the GPU, after the user's function has returned."""
    file, function = END_OF_CALL
    return frame.function == function and frame.file.endswith(file)


def waits_for_gpu(frames: Sequence[CodePlace], *, uses_gpu: bool) -> bool:
    """Return True if the innermost of these frames may wait for a GPU.

    Args:
        frames: Frames of a thread, innermost first.
        uses_gpu: True if the thread's rank uses a GPU, so that a read of a number is a wait.
    """
    top = frames[0]
    if top.file.endswith(SYNCHRONIZE):
        return top.function == "synchronize"
    if not uses_gpu:
        return False
    if is_end_of_call(top):
        return True
    if top.is_library:
        return top.file.endswith(READERS)
    return READS.search(top.source) is not None
