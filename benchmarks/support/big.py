"""A gigabyte to the ranks, and a gigabyte back."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil

from support.measurements import LABELS, LIMIT, Measurements
from support.process import Contender, FailedError, contenders
from support.report import megabytes, table

BIG = ["ours", "torch-fork", "torch-spawn", "accelerate", "torchrunx", "nbdistributed"]
BIG_RANKS = 4
NEEDED = {"torch-spawn": 8e9, "torchrunx": 10e9, "nbdistributed": 10e9}
"""Bytes of memory that a contender may take: a copy for each rank, and pickles or text of it beside them."""
NEEDED_BY_OTHERS = 4e9


def back_memory() -> None:
    """Use and free memory once, because a virtual machine takes seconds to get memory from its host at first use."""
    size = min(16e9, 0.6 * psutil.virtual_memory().available)
    code = f"bytearray({int(size)})[::4096] = bytes(-(-{int(size)} // 4096))"
    subprocess.run([sys.executable, "-c", code], check=False)


def measure_big(found: Measurements, repeats: int) -> None:
    back_memory()
    with contenders(found.chosen(BIG), BIG_RANKS) as started:
        for contender in started:
            with found.guarded("up", contender.name):
                contender.ask("prepare", timeout=LIMIT)
                contender.settle()
        for _ in range(repeats):
            for contender in started:
                measure_big_once(found, contender)
        for contender in started:
            for kind in ("none", "array", "tensor"):
                with found.guarded("memory", contender.name, kind):
                    require_memory(contender)
                    for what, size in contender.ask("capture_memory", kind, timeout=LIMIT).items():
                        found.add(size, "memory", contender.name, kind, what)


def require_memory(contender: Contender) -> None:
    """Raise `FailedError`, the reason in a contender's row, if its work would take all memory of the machine."""
    contender.require(NEEDED.get(contender.name, NEEDED_BY_OTHERS))


def measure_big_once(found: Measurements, contender: Contender) -> None:
    with contextlib.suppress(FailedError):
        for what, seconds in contender.ask("copy", timeout=LIMIT).items():
            found.add(seconds, "copy", what)
    for kind in ("none", "array", "tensor"):
        key = ("capture", contender.name, kind)
        if key not in found.reasons:
            with found.guarded(*key):
                require_memory(contender)
                found.add(contender.ask("capture", kind, timeout=LIMIT)["seconds"], *key)
    if ("return", contender.name) not in found.reasons:
        with found.guarded("return", contender.name):
            require_memory(contender)
            answer = contender.ask("returned", timeout=LIMIT)
            found.add(answer["seconds"], "return", contender.name)
            found.add(answer["peak"], "peak", contender.name)


def big_table(found: Measurements) -> str:
    rows = []
    copy = found.median("copy", "new") or float("nan")
    for name in found.chosen(BIG):
        cells = [LABELS[name][0]]
        for kind in ("array", "tensor"):
            extra = extra_time(found, name, kind)
            reason = found.reasons.get(("capture", name, kind))
            cells.append(f"{1e3 * extra:,.0f} ({extra / copy:.2f})" if extra is not None else f"failed: {reason}"[:120])
            cells.append(extra_memory(found, name, kind))
        back = found.median("return", name)
        cells.append(f"{1e3 * back:,.0f} ({back / copy:.2f})" if back else found.cell("return", name))
        cells.append(found.cell("peak", name, form=lambda values: megabytes(max(values))))
        rows.append(cells)
    head = ["launcher"]
    for kind in ("array", "tensor"):
        head += [f"{kind} there: ms (copies)", "ranks' memory, MB: shared out / private"]
    head += ["state back: ms (copies)", "kernel's peak, MB"]
    return (
        f"## One GB to {BIG_RANKS} ranks, and back from rank 0\n\n"
        f"One memory copy of 1 GB took {found.cell('copy', 'new')} ms into new memory; the figures in brackets "
        f"are multiples of this time (an array, in the huge pages that NumPy asks for; a tensor's clone took "
        f"{found.cell('copy', 'tensor')} ms), and {found.cell('copy', 'used')} ms into memory in use.\n\n"
        "*There*: until the function has begun on every rank, minus this time without data. *Memory*: growth of "
        "all ranks together after reading all of the data, proportional to sharing / private. *Back*: from the end of "
        "the function to a dictionary of 16 tensors in the caller; by hand through a queue for torch, through "
        "`torch.save` into memory for Accelerate. *Peak*: growth of the caller's resident memory after reading the "
        "whole result, whose own size is 1,074 MB.\n\n" + table(head, rows)
    )


def extra_time(found: Measurements, name: str, kind: str) -> float | None:
    there, without = found.median("capture", name, kind), found.median("capture", name, "none")
    return None if there is None or without is None else there - without


def extra_memory(found: Measurements, name: str, kind: str) -> str:
    sizes = []
    for what in ("pss", "private"):
        there, without = (found.median("memory", name, which, what) for which in (kind, "none"))
        if there is None or without is None:
            return "-"
        sizes.append(megabytes(max(0.0, there - without)))
    return " / ".join(sizes)
