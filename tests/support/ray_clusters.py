"""A Ray cluster of two nodes on this machine, as a test or a benchmark uses it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from typing import IO, TYPE_CHECKING

import psutil

from tests.support import ray_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

ADDRESS = re.compile(r"[\d.]+:\d+$")


class RayCluster:
    """A running cluster, whose nodes say that they have 4 CPUs and 2 GPUs each.

    Args:
        address: The cluster's address.
        requests: Takes requests to the program of the cluster.
        answers: Yields the program's answers.
    """

    def __init__(self, address: str, requests: IO[str], answers: IO[str]) -> None:
        self.address = address
        self._requests, self._answers = requests, answers

    def add_node(self) -> None:
        """Start one more node, and wait until Ray counts it."""
        self._requests.write(f"{ray_nodes.ADD}\n")
        self._requests.flush()
        assert any(line.strip() == ray_nodes.ADDED for line in self._answers), "the program of the cluster has ended"


@contextlib.contextmanager
def ray_cluster(without: Collection[str] = ()) -> Iterator[RayCluster]:
    """Start a cluster for the time of a block; raises `AssertionError` if it does not start.

    Args:
        without: Names of variables that its processes do not inherit. Tests name the mark of their own processes,
            because Ray starts and ends workers when it likes.
    """
    env = {name: value for name, value in os.environ.items() if name not in without}
    with tempfile.TemporaryDirectory(prefix="nlray", dir="/tmp") as folder:  # A socket's path is short.
        command = [sys.executable, ray_nodes.__file__, folder]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            program.wait()  # The cluster is a process that it left behind.
            address = next((line.strip() for line in program.stdout if ADDRESS.match(line)), "")
            assert address, "the cluster did not start"
            try:
                yield RayCluster(address, program.stdin, program.stdout)
            finally:
                program.stdin.close()
                program.stdout.read()
        left = [process for process in psutil.process_iter(["cmdline"]) if folder in str(process.info["cmdline"])]
        for process in psutil.wait_procs(left, timeout=10)[1]:
            process.kill()
