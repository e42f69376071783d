"""A contender as the measuring program sees it: starts it, sends commands, and removes all of its processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from notebook_launcher.travel.parcel import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HERE = Path(__file__).resolve().parent
PR_SET_CHILD_SUBREAPER = 36
IN_MEMORY = Path("/dev/shm")
TAG = "PYTHON_BENCHMARK_CONTENDER"
"""Variable in the environment of all processes of a contender; torchrunx passes on names with this prefix."""
SETTLED = 0.6
"""Seconds without processor time after which a process tree counts as idle."""
SETTLE_LIMIT = 20.0
RESERVE = 1.5e9
"""Bytes of free memory; a contender that leaves less is ended, because a machine without any stalls for minutes."""
LOOK = 0.25
"""Seconds between two looks at the free memory while a contender works."""


class FailedError(Exception):
    """A command of a contender failed; the message is shown in the contender's row."""


def adopt_orphans() -> None:
    """Make orphaned processes of contenders children of this process, where `Contender.kill` finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Contender:
    """A contender's process; a context manager that ends it with all processes that it started."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self.name = name
        commands_r, commands_w = os.pipe()
        answers_r, answers_w = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        # Made here, so that it is removed even if the contender is killed.
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None)
        self._tag = f"{os.getpid()}-{id(self)}"
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])]),
            "GLOO_SOCKET_IFNAME": "lo",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "BENCHMARK_FOLDER": self._folder.name,
            TAG: self._tag,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "contender.py"), name, str(num_ranks), str(commands_r), str(answers_w)],
            pass_fds=[commands_r, answers_w], stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output,
            start_new_session=True, env=environ,
        )  # fmt: skip
        os.close(commands_r)
        os.close(answers_w)
        self._commands, self._answers = commands_w, answers_r
        self._family: dict[int, psutil.Process] = {}

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FailedError):
            self.ask("close", timeout=15)
        self.family()
        self.kill()
        os.close(self._commands)
        os.close(self._answers)
        self._output.close()
        self._folder.cleanup()

    def tell(self, command: str, *args: Any) -> None:
        """Send a command without waiting for its answer."""
        try:
            os.write(self._commands, json.dumps([command, *args]).encode() + b"\n")
        except OSError as error:
            raise FailedError(f"its process is gone: {self._last_words()}") from error

    def ask(self, command: str, *args: Any, timeout: float) -> dict[str, Any]:
        """Send a command and return the answer; raises `FailedError` if it fails or takes too long."""
        self.tell(command, *args)
        answer = b""
        deadline = time.monotonic() + timeout
        while not answer.endswith(b"\n"):
            if not select.select([self._answers], [], [], max(0.0, min(LOOK, deadline - time.monotonic())))[0]:
                if time.monotonic() >= deadline:
                    self._give_up(f"no answer within {timeout:g} s")
                if (free := available_memory()) < RESERVE:
                    self._give_up(f"ended, because it had left {free / 1e9:.1f} GB of memory free")
                continue
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise FailedError(f"its process ended: {self._last_words()}")
            answer += chunk
        values: dict[str, Any] = json.loads(answer)
        if "failed" in values:
            raise FailedError(" ".join(values["failed"].split()))
        return values

    def require(self, size: float) -> None:
        """Raise `FailedError` unless so many bytes of memory are free, beside the reserve."""
        if (free := available_memory()) < size + RESERVE:
            raise FailedError(f"needs {(size + RESERVE) / 1e9:.1f} GB of free memory, has {free / 1e9:.1f}")

    def _give_up(self, reason: str) -> NoReturn:
        self.family()
        self.kill()
        raise FailedError(reason)

    def family(self) -> dict[int, psutil.Process]:
        """Return the contender's process and all descendants that were found so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self._family.update({process.pid: process for process in [root, *root.children(recursive=True)]})
        return self._family

    def settle(self) -> None:
        """Wait until no process of the contender uses processor time, for example for postponed work."""
        settle(lambda: self.family().values())

    def kill_and_time(self, limit: float) -> float | None:
        """Kill the contender's process; return the seconds until its descendants have ended, or None after `limit`."""
        family = [process for process in self.family().values() if process.pid != self.process.pid]
        begin = time.monotonic()
        self.process.kill()
        self.process.wait()
        while any(_is_alive(process) for process in family):
            if time.monotonic() - begin > limit:
                return None
            time.sleep(0.002)
        return time.monotonic() - begin

    def kill(self) -> None:
        """Kill all processes of the contender that were found, and its orphans."""
        for process in self._family.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        # When a parent is killed, its children become children of this process, one generation after the other.
        while orphans := _orphans(self._tag):
            for process in orphans:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


def settle(processes: Callable[[], Iterable[psutil.Process]]) -> None:
    """Wait until these processes, which are listed again at each look, use no processor time."""
    end, last, since = time.monotonic() + SETTLE_LIMIT, -1.0, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < SETTLED:
        time.sleep(0.1)
        used = 0.0
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                used += sum(process.cpu_times()[:2])
        if used > last + 0.03:
            last, since = used, time.monotonic()


@contextlib.contextmanager
def contenders(names: list[str], num_ranks: int) -> Iterator[list[Contender]]:
    """Start these contenders together and end them together."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Contender(name, num_ranks)) for name in names]


def _orphans(tag: str) -> list[psutil.Process]:
    """Return the processes of a contender that have become children of this process."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(TAG) == tag:
                found.append(process)
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
