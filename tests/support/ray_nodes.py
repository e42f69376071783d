"""A program that runs a Ray cluster of two nodes on this machine until its standard input ends.

    python ray_nodes.py FOLDER

It prints the cluster's address. The nodes say that they have 4 CPUs and 2 GPUs each. A line ADD on standard input
starts one more node, and is answered by ADDED.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
DASHBOARD = "ray/dashboard/agent.py"
ADD, ADDED = "add", "added"


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
