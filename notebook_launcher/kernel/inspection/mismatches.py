"""Collectives that do not match: which rank runs which collective, on which tensors, at which line.

With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch compares the collectives of all ranks before it runs them. On a mismatch
each rank gets an error that begins with a fingerprint of its own collective. Only that fingerprint is read, because
the fingerprints of other ranks, which follow, may be garbled.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

from notebook_launcher.kernel.inspection.stacks import LIBRARIES, StackFrame
from notebook_launcher.tracebacks import is_ours
from notebook_launcher.wording.counts import rank_list

if TYPE_CHECKING:
    from notebook_launcher.kernel.failures.failure import Failure
    from notebook_launcher.kernel.inspection.stacks import Stacks
    from notebook_launcher.messaging.messages import ExceptionReport

__all__ = ["SIZES_DIFFER", "SUGGESTION", "collective_in", "describe_mismatch", "suggestion", "waits_in"]

FINGERPRINT = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank \d+ is running collective: "
    r"CollectiveFingerPrint\(SequenceNumber=\d+(?:, )?OpType=(?P<kind>\w+)"
    r"(?:, TensorShape=(?P<shapes>.*?), TensorDtypes=(?P<dtypes>.*?), TensorDeviceTypes=)?"
)
NAMES = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}
"""Public names of torch's collectives, unless they are the same in lower case."""
COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")
"""Files with the collectives, and with the function around each."""
SIZES_DIFFER = re.compile(
    r"Is there a distributed collective mismatch in your code\?"
    r"|op\.preamble\.length <= op\.nbytes"  # torch 2.6
)
"""The words with which gloo aborts a process that got another number of bytes than it expected."""
SUGGESTION = (
    "Pass check_collectives=True to have the first collective named that does not match: by rank, with line and shape."
)
FLIGHT_RECORDER = (
    "With NCCL torch also records the last collectives of each rank: "
    'env={"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/nccl_rank_"} writes them at its '
    "time-out, and `torchfrtrace /tmp --prefix nccl_rank_` compares them (not tried by this package)."
)


def collective_in(report: ExceptionReport) -> str:
    """Return `all_reduce of float [10], Cell In[3], line 4: dist.all_reduce(x)`; empty without a mismatch."""
    found = FINGERPRINT.search(report.message)
    if found is None:
        return ""
    name = NAMES.get(found["kind"], found["kind"].lower())
    tensors = f" of {found['dtypes'].lower()} {found['shapes']}" if found["shapes"] else ""
    return _with_line(f"{name}{tensors}", report)


def waits_in(report: ExceptionReport) -> str:
    """Return the call in which a rank lost its peers: `all_reduce, Cell In[3], line 4: dist.all_reduce(x)`."""
    # An operation of this package goes by the name that the user has called.
    calls = [
        frame.name
        for frame in report.frames
        if is_ours(frame.filename) or (frame.filename.endswith(COLLECTIVES) and frame.name != "wrapper")
    ]
    in_backward = any("/torch/autograd/" in frame.filename for frame in report.frames)
    return _with_line("backward" if in_backward else calls[0] if calls else "a collective", report)


def _with_line(what: str, report: ExceptionReport) -> str:
    """Return what a rank was in, with the user's line that led there."""
    own = [frame for frame in report.frames if not (LIBRARIES.search(frame.filename) or is_ours(frame.filename))]
    if not own:
        return what
    frame = StackFrame(own[-1].name, own[-1].filename, own[-1].lineno)
    source = own[-1].line.strip() or frame.source
    return f"{what}, {frame.place}" + (f": {source}" if source else "")


def describe_mismatch(failures: tuple[Failure, ...]) -> list[str]:
    """Return a line for each collective, with its ranks; no line if none of the failures is a mismatch."""
    ranks: dict[str, list[int]] = collections.defaultdict(list)
    for failure in sorted(failures, key=lambda failure: failure.rank):
        if failure.collective:
            ranks[failure.collective].append(failure.rank)
    if not ranks:
        return []
    lines = [f"  {rank_list(callers)}: {collective}" for collective, callers in ranks.items()]
    return ["The ranks were in collectives that do not match:", *lines]


def suggestion(stacks: Stacks | None, *, is_checked: bool, backend: str | None) -> str:
    """Return lines that name what finds the cause if ranks waited in different collectives; else nothing."""
    waiting = {stack.waiting_in for stack in stacks or ()} - {None}
    if len(waiting) < 2:
        return ""
    lines = [] if is_checked else [SUGGESTION]
    return "\n".join([*lines, FLIGHT_RECORDER] if "nccl" in (backend or "") else lines)
