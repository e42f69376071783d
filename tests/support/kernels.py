r"""Real kernels for tests: started, spoken to, and always shut down.

    with Kernel() as kernel:
        outcome = kernel.execute("print(1 + 1)")
        assert outcome.stdout == "2\n"

`NOTEBOOK_LAUNCHER_TEST_PATH` is put before everything else on the kernel's `PYTHONPATH`: a folder with
another version of ipykernel lets the same tests run on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from jupyter_core import utils as jupyter_utils

from notebook_launcher.kernel.display.questions import READER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 100.0
"""Seconds until a test gives a kernel up: on a busy machine compiling something takes more than a minute."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Messages with which a kernel has answered a cell so far."""

    msg_id: str
    messages: tuple[dict[str, Any], ...]
    """All iopub messages that answer this cell, in order."""
    done: bool = False
    """True once the kernel has reported the end of the cell."""

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the contents of the messages of these types."""
        return [message["content"] for message in self.messages if message["msg_type"] in kinds]

    @property
    def streams(self) -> list[tuple[str, str]]:
        """`(name, text)` of every stream message."""
        return [(content["name"], content["text"]) for content in self.of("stream")]

    @property
    def stdout(self) -> str:
        return "".join(text for name, text in self.streams if name == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(text for name, text in self.streams if name == "stderr")

    @property
    def displays(self) -> list[dict[str, Any]]:
        """Contents of `display_data` messages: `data`, `metadata`, `transient`."""
        return self.of("display_data")

    @property
    def updates(self) -> list[dict[str, Any]]:
        """Contents of `update_display_data` messages."""
        return self.of("update_display_data")

    @property
    def result(self) -> str | None:
        """`text/plain` of the value of the cell's last expression."""
        results = self.of("execute_result")
        return results[-1]["data"]["text/plain"] if results else None

    @property
    def error(self) -> str | None:
        """`ValueError: boom`, if the cell raised."""
        errors = self.of("error")
        return f"{errors[-1]['ename']}: {errors[-1]['evalue']}" if errors else None

    @property
    def brief(self) -> str:
        """One line that says how far the cell is."""
        state = "the cell has ended" if self.done else "the cell is running"
        return f"{state}, {self.error or 'without error'}, {len(self.messages)} messages: {self.stdout[-200:]!r}"

    @property
    def traceback(self) -> str:
        """The traceback that the cell shows."""
        return "\n".join(line for content in self.of("error") for line in content["traceback"])


@contextlib.contextmanager
def no_loop_left() -> Iterator[None]:
    """Close the event loop that jupyter_client makes for its first kernel and keeps."""
    loop = jupyter_utils._loop.get()
    owns_loop = loop is None or loop.is_closed()
    yield
    if owns_loop:
        jupyter_utils.ensure_event_loop().close()
        asyncio.set_event_loop(None)


class Kernel:
    """An ipykernel in a process of its own."""

    def __init__(
        self, *, python: str = sys.executable, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._folder = contextlib.ExitStack()
        home = self._folder.enter_context(tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True))
        self._log = self._folder.enter_context(Path(home, "log").open("w+"))  # noqa: SIM115
        self._context = zmq.Context()
        connection_file = str(Path(home, "connection.json"))
        self._manager = KernelManager(connection_file=connection_file, context=self._context)
        if "PYTEST_XDIST_WORKER" in os.environ:
            # Ports are chosen before the kernel opens them, so that a test beside this one may take one of them.
            self._manager.transport, self._manager.ip = "ipc", str(Path(home, "socket"))
        self._manager._kernel_spec = KernelSpec(
            argv=[python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            name="test",
            language="python",
        )
        paths = [os.environ.get("NOTEBOOK_LAUNCHER_TEST_PATH"), str(ROOT), os.environ.get("PYTHONPATH")]
        self._env = {
            **os.environ,
            "IPYTHONDIR": home,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            READER: "person",  # who sees what comes after a cell; an agent is told more, and shown less
            **(env or {}),
        }
        self._cwd = cwd
        self._messages: dict[str, list[dict[str, Any]]] = {}
        self._idle: set[str] = set()
        self._replied: set[str] = set()

    def __enter__(self) -> Kernel:
        self._folder.enter_context(no_loop_left())
        self._manager.start_kernel(env=self._env, cwd=self._cwd, stdout=self._log, stderr=self._log)
        self._client = self._manager.client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=PATIENCE)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._context.destroy(linger=0)
        self._folder.close()

    @property
    def pid(self) -> int:
        """The kernel's process."""
        provisioner: Any = self._manager.provisioner
        return int(provisioner.process.pid)

    @property
    def log(self) -> str:
        """Text that the kernel wrote to its own terminal."""
        return Path(self._log.name).read_text()

    def execute(
        self, code: str, timeout: float = PATIENCE, *, answer_input: Callable[[str, bool], str] | None = None
    ) -> Outcome:
        """Run a cell to its end.

        Args:
            code: The cell.
            timeout: Seconds.
            answer_input: Gets the prompt and whether it is a password, and returns the answer. Without it
                the cell runs as under nbclient, where `input()` cannot be answered.
        """
        return self.wait(self.start(code, allow_stdin=answer_input is not None), timeout, answer_input=answer_input)

    def start(self, code: str, *, allow_stdin: bool = False, metadata: Mapping[str, str] | None = None) -> str:
        """Send a cell off and return its id; `metadata` is what a front end adds to its request."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "stop_on_error": True}
        request = self._client.session.msg("execute_request", {**content, "allow_stdin": allow_stdin})
        request["metadata"].update(metadata or {})
        self._client.shell_channel.send(request)
        return str(request["header"]["msg_id"])

    def send_comm(
        self, comm_id: str, data: dict[str, Any], *, opens: str | None = None, buffers: Any = (), **header: Any
    ) -> str:
        """Send what a page sends to a widget, or to a target whose comm it opens; return the message's id.

        `header` fields are added.
        """
        content = {"comm_id": comm_id, "data": data}
        message = self._client.session.msg("comm_msg", content)
        if opens is not None:
            message = self._client.session.msg("comm_open", {**content, "target_name": opens})
            message["metadata"]["version"] = "1.0.0"  # of ipywidgets' protocol
        message["header"].update(header)
        self._client.session.send(self._client.shell_channel.socket, message, buffers=list(buffers))
        return str(message["header"]["msg_id"])

    def ask_control(self, kind: str, **content: Any) -> dict[str, Any]:
        """Send a request on the control channel and return the content of the reply."""
        channel = self._client.control_channel
        channel.send(self._client.session.msg(kind, content))
        reply: dict[str, Any] = channel.get_msg(timeout=PATIENCE)["content"]
        return reply

    @property
    def received(self) -> list[dict[str, Any]]:
        """All iopub messages so far, whatever they answer, in the order in which they were sent."""
        every = (message for messages in self._messages.values() for message in messages)
        return sorted(every, key=lambda message: message["header"]["date"])

    def wait(
        self,
        msg_id: str,
        timeout: float = PATIENCE,
        *,
        until: Callable[[Outcome], bool] = lambda outcome: outcome.done,
        answer_input: Callable[[str, bool], str] | None = None,
    ) -> Outcome:
        """Wait until a cell has ended, or until its output is as wanted; late output counts too."""
        deadline = time.monotonic() + timeout
        while not until(outcome := self.outcome(msg_id)):
            is_dead = not self._manager.is_alive()
            if is_dead or time.monotonic() > deadline:
                # On standard error, since a summary in CI holds the whole text of the exception.
                print(outcome, self.log, sep="\n", file=sys.stderr)
                raise AssertionError("the kernel died" if is_dead else f"not met after {timeout} s; {outcome.brief}")
            self._receive(answer_input)
        return outcome

    def outcome(self, msg_id: str) -> Outcome:
        """Return what has arrived for a cell."""
        done = msg_id in self._idle and msg_id in self._replied
        return Outcome(msg_id, tuple(self._messages.get(msg_id, ())), done)

    def interrupt(self) -> None:
        """Press the square button."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """Kill the kernel as the out-of-memory killer does."""
        os.kill(self.pid, signal.SIGKILL)

    def _receive(self, answer_input: Callable[[str, bool], str] | None) -> None:
        channels = [self._client.iopub_channel, self._client.shell_channel, self._client.stdin_channel]
        poller = zmq.Poller()
        for channel in channels:
            poller.register(channel.socket, zmq.POLLIN)
        ready = dict(poller.poll(200))
        for channel in channels:
            if channel.socket not in ready:
                continue
            message = channel.get_msg(timeout=5)
            parent = message["parent_header"].get("msg_id", "")
            match message["msg_type"]:
                case "status" if message["content"]["execution_state"] == "idle":
                    self._idle.add(parent)
                case "execute_reply":
                    self._replied.add(parent)
                case "input_request":
                    assert answer_input is not None, f"unexpected prompt {message['content']}"
                    content = message["content"]
                    self._client.input(answer_input(content["prompt"], content["password"]))
                case _ if channel is channels[0]:
                    self._messages.setdefault(parent, []).append(message)
