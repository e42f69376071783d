"""A Ray cluster of two nodes on this machine, as a test or a benchmark uses it, and the program that runs it.

    python ray_clusters.py FOLDER

The program prints the cluster's address, and runs the cluster until its standard input ends. A line ADD on standard
input starts one more node, and is answered by ADDED.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

PR_SET_PDEATHSIG = 1
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
ADD, ADDED = "add", "added"
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
        self._requests.write(f"{ADD}\n")
        self._requests.flush()
        assert any(line.strip() == ADDED for line in self._answers), "the program of the cluster has ended"


@contextlib.contextmanager
def ray_cluster(without: Collection[str] = ()) -> Iterator[RayCluster]:
    """Start a cluster for the time of a block; raises `AssertionError` if it does not start.

    Args:
        without: Names of variables that its processes do not inherit. Tests name the mark of their own processes,
            because Ray starts and ends workers when it likes.
    """
    env = {name: value for name, value in os.environ.items() if name not in without}
    with tempfile.TemporaryDirectory(prefix="nlray", dir="/tmp") as folder:  # A socket's path is short.
        command = [sys.executable, __file__, folder]
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


# The program.


def stand_in_for_dashboard() -> None:
    """Be the agent of the dashboard that a raylet starts, without its many imports.

    A raylet gives up if they take more than 15 s, as they do on a busy machine.
    """
    parser = argparse.ArgumentParser()
    for name in ("node-id", "session-dir"):
        parser.add_argument(f"--{name}")
    options, _ = parser.parse_known_args()
    for name in PORTS:
        part = Path(options.session_dir, "part")
        part.write_text("-1")
        part.rename(Path(options.session_dir, f"{name}_{options.node_id}"))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pause()


def run_cluster(folder: str) -> None:
    """Run the cluster, in a process that is nobody's child."""
    if os.fork():
        os._exit(0)
    os.environ["RAY_TMPDIR"] = folder  # For everything: Cluster takes no temp_dir for its file of the address.
    from ray._private import services
    from ray.cluster_utils import Cluster

    start = services.start_ray_process

    def start_without_dashboard(command: list[str], *args: Any, **kwargs: Any) -> Any:
        dashboard = str(Path(services.RAY_PATH, "dashboard", "agent.py"))
        return start([word.replace(dashboard, __file__) for word in command], *args, **kwargs)

    services.start_ray_process = start_without_dashboard
    cluster = Cluster()
    try:
        for _ in range(2):
            add_node(cluster)
        cluster.wait_for_nodes(60)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line.strip() == ADD:
                add_node(cluster, wait=True)
                print(ADDED, flush=True)
    finally:
        cluster.shutdown()


def add_node(cluster: Any, *, wait: bool = False) -> None:
    """Start a node; with `wait`, return once Ray counts it."""
    with socket.socket() as sock:  # A port that is given is not waited for.
        sock.bind(("", 0))
        port = sock.getsockname()[1]
    cluster.add_node(
        wait=wait,
        include_dashboard=False,
        runtime_env_agent_port=port,
        num_cpus=4,
        num_gpus=2,
        object_store_memory=100 << 20,
    )


if __name__ == "__main__":
    stand_in_for_dashboard() if len(sys.argv) > 2 else run_cluster(sys.argv[1])
