"""The driver: a process beside the kernel that is connected to Ray, and passes bytes on between kernel and actors.

    kernel ── pipes ── driver ══ Ray ══ AgentActor ── pipes ── agent
              control ─┘

Ray stays out of the kernel: its threads, its signal handlers, its logging, and a connection of the user's own. The
driver ends when the kernel has closed the control socket and every agent has ended, or when the kernel is gone.

    python -m notebook_launcher.engines.cluster.ray_driver FD KERNEL_PID ADDRESS
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import socket
import sys
import threading
from typing import Any

from notebook_launcher.engines.cluster import ray_actor

CHUNK = 1 << 20
MESSAGE_SIZE = 1 << 18
WINDOW = 8
"""Calls to an actor that may be under way at once."""
KILL_PATIENCE = 2.0
END_PATIENCE = 15.0
"""Longest wait in seconds for an agent to end its ranks, once its link was closed."""
MAX_WORDS = 4000
KIND = "accelerator_type:"
"""Begins the name of the resource that names the GPUs of a node."""


class Relay:
    """The way between the kernel's pipes and one agent.

    Args:
        fds: The first carries the kernel's bytes, the second takes the agent's bytes, the third takes the reason of
            the end, and is closed last.
        request: The node, the resources to ask for, and the runtime environment.
    """

    def __init__(self, fds: list[int], request: dict[str, Any]) -> None:
        self._read_fd, self._write_fd, self._end_fd = fds
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id=request["node_id"], soft=False)
        self._actor = (
            _actor_class()
            .options(
                scheduling_strategy=strategy,
                num_cpus=request["cpus"],
                num_gpus=request["gpus"],
                **({"runtime_env": request["runtime_env"]} if request["runtime_env"] else {}),
            )
            .remote()
        )
        self._stream = self._actor.read.options(num_returns="streaming").remote()
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self.is_over = threading.Event()
        self._downwards = threading.Thread(target=self._pass_down, daemon=True)
        self._downwards.start()
        threading.Thread(target=self._pass_up, daemon=True).start()

    def kill(self) -> None:
        """End the agent's actor at once, and the agent with it."""
        self._kill_actor()
        # The stream of an actor that Ray has not placed may not end.
        late = threading.Timer(KILL_PATIENCE, self._end, ("its actor was ended before it was placed",))
        late.daemon = True
        late.start()

    def _kill_actor(self) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._actor)

    def _end(self, words: str) -> None:
        """Report the end to the kernel, once."""
        with self._lock:
            if self.is_over.is_set():
                return
            self._has_ended.set()
            with contextlib.suppress(OSError):
                os.write(self._end_fd, words.encode()[:MAX_WORDS])
            for fd in (self._write_fd, self._end_fd):
                os.close(fd)
            self.is_over.set()

    def _pass_down(self) -> None:
        import ray

        under_way: collections.deque[Any] = collections.deque()
        number = 0
        with contextlib.suppress(Exception):  # The stream ends with the actor.
            while data := os.read(self._read_fd, CHUNK):
                under_way.append(self._actor.write.remote(number, data))
                number += 1
                if len(under_way) >= WINDOW:
                    ray.get(under_way.popleft())
            self._actor.write.remote(number, b"")
            self._has_ended.wait(END_PATIENCE)
        if not self._has_ended.is_set():
            self._kill_actor()

    def _pass_up(self) -> None:
        import ray

        words = "its link has ended"
        try:
            for reference in self._stream:
                data = ray.get(reference)
                if isinstance(data, bytes):
                    _write(self._write_fd, data)
                elif isinstance(data, str):
                    words = data
                else:
                    words = f"it ended with {data[0]}\n{data[1]}"
        except Exception as error:  # whatever Ray raises for an actor that is gone
            words = f"{type(error).__name__}: {error}"
        self._has_ended.set()
        self._kill_actor()
        self._end(words)
        # Where the thread that reads is blocked, the kernel closes the other end now.
        self._downwards.join()
        os.close(self._read_fd)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _actor_class() -> Any:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(ray_actor)
    # Bytes go in on one thread, while another reads; the rest is for calls that overtake each other.
    return ray.remote(num_cpus=0, max_concurrency=1 + WINDOW, max_restarts=0)(ray_actor.AgentActor)


def _nodes() -> list[dict[str, Any]]:
    """Return the living nodes in the order of their addresses: the fields of `ray_engine.NodeShare`."""
    import ray

    free: dict[str, dict[str, float]] = {}
    with contextlib.suppress(ImportError, AttributeError):  # This version of Ray does not report it.
        from ray._private.state import available_resources_per_node  # No public function reports it by node.

        free = dict(available_resources_per_node())
    nodes = [
        {
            "node_id": node["NodeID"],
            "host": node["NodeManagerHostname"],
            "address": node["NodeManagerAddress"],
            "cpus": node["Resources"].get("CPU", 0.0),
            "gpus": int(node["Resources"].get("GPU", 0)),
            "kind": next((name[len(KIND) :] for name in node["Resources"] if name.startswith(KIND)), "GPU"),
            "is_busy": _is_busy(node["Resources"], free.get(node["NodeID"])),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node["address"], node["node_id"]))


def _is_busy(there: dict[str, float], free: dict[str, float] | None) -> bool:
    return free is not None and any(free.get(name, 0) < there.get(name, 0) for name in ("CPU", "GPU"))


class Driver:
    """Serves the kernel at the other end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._relays: dict[int, Relay] = {}

    def tell(self, **message: Any) -> None:
        """Send a message to the kernel."""
        self._control.send(json.dumps(message).encode())

    def serve(self) -> None:
        """Carry out requests until the kernel closes the socket; then wait for the agents."""
        while True:
            message, fds, _, _ = socket.recv_fds(self._control, MESSAGE_SIZE, 3)
            if not message:
                break
            request = json.loads(message)
            if "connect" in request:
                self._relays = {number: relay for number, relay in self._relays.items() if not relay.is_over.is_set()}
                self._relays[request["connect"]] = Relay(fds, request)
            elif "kill" in request:
                if (relay := self._relays.get(request["kill"])) is not None:
                    relay.kill()
            else:
                self.tell(ask=request["ask"], nodes=_nodes())
        for relay in self._relays.values():
            relay.is_over.wait()


def _end_with(pid: int) -> None:
    """End this process with the kernel, even if a fork of the kernel holds the other end of the control socket."""
    with contextlib.suppress(OSError):
        select.select([os.pidfd_open(pid)], [], [])
    os._exit(0)


def main() -> None:
    """Connect to Ray, and serve the kernel."""
    import ray

    control, kernel_pid, address = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    threading.Thread(target=_end_with, args=(kernel_pid,), daemon=True).start()
    driver = Driver(control)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # every error is sent to the kernel
        driver.tell(error=f"{type(error).__name__}: {error}"[:MAX_WORDS])
        os._exit(1)
    # Ray itself sets the variable if it finds a token.
    driver.tell(is_guarded=os.environ.get("RAY_AUTH_MODE", "").lower() not in ("", "disabled"))
    driver.serve()
    # Without disconnecting from Ray, which takes seconds; what is left of the job ends with this process.
    os._exit(0)


if __name__ == "__main__":
    main()
