"""Ranks as plain processes with torchrun's variables, and the reports of rank 0."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.process import FailedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from support.links import Network

HERE = Path(__file__).resolve().parent
REPORTS = "BENCHMARK_REPORTS"
"""Variable with the descriptor to which rank 0 writes its reports."""
EXIT_LIMIT = 20.0
"""Seconds that the ranks may take to end after their last report."""
PR_SET_PDEATHSIG = 1


def reports(
    network: Network,
    program: str,
    spec: dict[str, Any],
    *,
    limit: float,
    world_size: int = 2,
    more: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run `program` on two ranks, more on one node, or in one process without torchrun's variables; yield its reports.

    `more` has further environment variables of the ranks.

    Raises:
        FailedError: a rank ended with an error, or there was no report for `limit` seconds.
    """
    reading, writing = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reading)
        with os.fdopen(writing, "wb"):
            outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
            command = [sys.executable, str(HERE / program), json.dumps(spec)]
            ranks = []
            for rank, output in enumerate(outputs):
                torchrun = _torchrun_variables(network, rank, world_size) if world_size > 1 else {}
                environ = {**torchrun, **(more or {}), REPORTS: str(writing) if rank == 0 else ""}
                ranks.append(
                    stack.enter_context(_process([*network.enter[min(rank, 1)], *command], environ, output, writing))
                )
        yield from _lines(reading, limit)
        end = time.monotonic() + EXIT_LIMIT
        failed = [
            f"rank {rank}: {_last_words(outputs[rank])}" for rank, one in enumerate(ranks) if not _ended(one, end)
        ]
        if failed:
            raise FailedError("; ".join(failed))


def _torchrun_variables(network: Network, rank: int, world_size: int) -> dict[str, str]:
    one_node = network.link.megabits is None
    return {
        **network.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if one_node else 0),
        "LOCAL_WORLD_SIZE": str(world_size if one_node else 1),
        "WORLD_SIZE": str(world_size),
    }


@contextlib.contextmanager
def _process(
    command: list[str], environ: dict[str, str], output: Any, writing: int
) -> Iterator[subprocess.Popen[bytes]]:
    whole = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])]),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=whole,
        pass_fds=[writing] if environ[REPORTS] else [],
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ended(process: subprocess.Popen[bytes], end: float) -> bool:
    try:
        return process.wait(max(0.1, end - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        return False


def _lines(reading: int, limit: float) -> Iterator[dict[str, Any]]:
    rest = b""
    while True:
        if not select.select([reading], [], [], limit)[0]:
            raise FailedError(f"no report of the ranks for {limit:g} s")
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _last_words(output: Any) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "a rank ended without output"


# The rank's side.


def start_rank() -> dict[str, Any]:
    """Let this rank end with the measuring program, and return the rank's specification."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    spec: dict[str, Any] = json.loads(sys.argv[1])
    return spec


def report(**values: Any) -> None:
    """Send a report, if this is rank 0."""
    if number := os.environ[REPORTS]:
        os.write(int(number), json.dumps(values).encode() + b"\n")
