"""Check after each test that nothing is left of what the test started or changed.

A process is found by a mark in its inherited environment, also after its parents have died. Leftovers get `PATIENCE`
seconds to end by themselves.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import ipaddress
import os
import re
import select
import signal
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import zmq

from notebook_launcher.engines.fork_server_handle import fork_server

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 2.0
LISTENING = "0A"  # in /proc/net/tcp
MARK = "NOTEBOOK_LAUNCHER_TEST_SESSION"
FORK_SERVER = "notebook_launcher.processes.forkserver"
# What the handle on a fork server holds: its channel, and the file with its standard error.
FORK_SERVER_DESCRIPTORS = (re.compile(r"socket:"), re.compile(r"/memfd:notebook-launcher-errors"))
OUR_FILES = ("notebook-launcher", "notebook_launcher")
# As torch, multiprocessing and NCCL name theirs.
SHARED_MEMORY = ("torch_", "psm_", "sem.", "nccl-")
# pytest writes it itself.
# torch sets its compiler's folder at the first optimizer.
# scikit-learn sets those of OpenMP when it is imported.
VOLATILE_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
ADDRESSES: dict[tuple[str, str], str | None] = {}
"""Each socket that was seen, by its network and its name, with the address at which it listens."""
MOST_LISTENERS: dict[int, int] = {}
"""By process: the largest number of listening sockets that it had before a test."""
OTHERS: set[tuple[int, bytes]] = set()
"""Processes without the mark, which they cannot get any more, by number and start: their environment is read once."""
# tqdm keeps its monitor for the life of the process.
LASTING_THREADS = {"TMonitor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Processes, threads, files and settings at one moment; things without words of their own are by a key."""

    processes: list[psutil.Process]
    threads: dict[Any, str]
    descriptors: dict[Any, str]
    listeners: dict[tuple[int, str], psutil.Process]
    files: dict[Any, str]
    settings: dict[Any, str]
    fork_servers: frozenset[int]


def observe() -> Surroundings:
    """Return the surroundings at this moment."""
    processes = _processes()
    return Surroundings(
        processes=processes,
        threads={
            thread: f"{thread!r}"
            for thread in threading.enumerate()
            # An interrupt inside `Thread.start` leaves a thread that never began in Python's list.
            if type(thread).__name__ not in LASTING_THREADS and thread.ident is not None
        },
        descriptors=_descriptors(),
        listeners=_listeners(processes),
        files={path: str(path) for path in _files()},
        settings=_settings(),
        fork_servers=frozenset(process.pid for process in processes if _is_fork_server(process)),
    )


def leftovers(before: Surroundings, after: Surroundings) -> list[str]:
    """Return a line for each thing in `after` that was not in `before`."""
    servers = _tolerated_servers(before, after)
    found = [
        f"process {_describe(process)}"
        for process in after.processes
        if process not in before.processes and process.pid not in servers
    ]
    found += [f"thread {text}" for key, text in after.threads.items() if key not in before.threads]
    found += [f"descriptor {text}" for text in _new_descriptors(before, after)]
    found += [f"listening socket {text}" for text in _new_listeners(before, after, servers)]
    files = {path: text for path, text in after.files.items() if path not in before.files}
    found += [f"file {text}" for path, text in files.items() if not _others_use(path)]
    for key in sorted({*before.settings, *after.settings}):
        was, now = before.settings.get(key), after.settings.get(key)
        if was != now:
            found.append(f"{key} was {was} and is {now}")
    return found


@pytest.fixture
def lasting() -> None:
    """Start what all tests of a file share; a file whose tests may end it overrides this fixture."""


@pytest.fixture(autouse=True)
def leave_nothing_behind(request: pytest.FixtureRequest, lasting: None) -> Iterator[None]:
    """Fail a test that leaves something behind; `@pytest.mark.leaks("reason")` lets it."""
    del lasting  # It is there before the test.
    excuse = request.node.get_closest_marker("leaks")
    if excuse is not None and not (excuse.args and str(excuse.args[0]).strip()):
        pytest.fail("the marker `leaks` needs a reason: @pytest.mark.leaks('why')")
    before = observe()
    yield
    found = [] if excuse is not None else _patiently(before)
    if found or excuse is not None:
        _clean_up(before)
    if found:
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def marked_session() -> Iterator[None]:
    """Mark every process of this session, and open what pyzmq keeps open for good."""
    zmq.Context.instance().socket(zmq.PAIR).close()
    os.environ[MARK] = uuid.uuid4().hex
    yield
    fork_server().stop()
    _clean_up(None)
    del os.environ[MARK]


def _patiently(before: Surroundings) -> list[str]:
    deadline = time.monotonic() + PATIENCE
    collected = False
    while found := leftovers(before, after := observe()):
        if time.monotonic() > deadline:
            break
        if not collected:
            # What only a reference cycle keeps open is the garbage collector's business.
            gc.collect()
            collected = True
            continue
        _wait_for_an_end([process for process in after.processes if process not in before.processes])
    return found


def _wait_for_an_end(processes: list[psutil.Process]) -> None:
    """Wait 20 ms, or less if one ends; `psutil.wait_procs` would reap it, and so hide a zombie."""
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        for process in processes:
            with contextlib.suppress(OSError, psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    fd = os.pidfd_open(process.pid)
                    stack.callback(os.close, fd)
                    poll.register(fd, select.POLLIN)
        poll.poll(20)


def _clean_up(before: Surroundings | None) -> None:
    """Kill what a test left, so that the next test does not meet it."""
    left = [
        process
        for process in _processes()
        if before is None or not (process in before.processes or _is_fork_server(process))
    ]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=PATIENCE)


def _processes() -> list[psutil.Process]:
    """Return the processes below this one, and those that inherited its mark and have lost their parents."""
    mark, parents, marked, others = f"{MARK}={os.environ.get(MARK)}".encode(), {}, set(), set()
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - a hundred paths would cost more than all else
        with contextlib.suppress(OSError):  # psutil reads twice as much, and each test looks twice.
            words = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            pid, started = int(name), words[19]
            parents[pid] = int(words[1])
            if (pid, started) in OTHERS or mark not in _read(f"/proc/{name}/environ").split(b"\0"):
                others.add((pid, started))
            else:
                marked.add(pid)
    OTHERS.clear()
    OTHERS.update(others)
    me, found = os.getpid(), []
    for pid in parents:
        ancestors = set(_ancestors(pid, parents))
        if pid != me and (pid in marked or me in ancestors):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid := parents.get(pid, 0):
        yield pid


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _describe(process: psutil.Process) -> str:
    words = []
    with contextlib.suppress(psutil.Error):
        words += [f"({process.status()})", process.name()]
        words[1:] = [" ".join(process.cmdline()) or process.name()]
    return " ".join([str(process.pid), *(words or ["(gone)"])])


def _is_fork_server(process: psutil.Process) -> bool:
    """Tell whether this is a fork server with a live owner or its deputy, rather than something else forked from it."""
    with contextlib.suppress(psutil.Error):
        if not _runs_fork_server(process) or process.status() == psutil.STATUS_ZOMBIE:
            return False
        owner = _owner(process)
        return owner is not None and not _runs_fork_server(owner) and _is_ours(owner)
    return False


def _owner(process: psutil.Process) -> psutil.Process | None:
    """Return the parent of a fork server; its session holds its deputy, too, and what either has just forked."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        leader = psutil.Process(os.getsid(process.pid))
        return leader.parent() if _runs_fork_server(leader) else process.parent()
    return process.parent()


def _runs_fork_server(process: psutil.Process) -> bool:
    return any(FORK_SERVER in word for word in process.cmdline())


def _is_ours(process: psutil.Process) -> bool:
    return process.pid == os.getpid() or process.environ().get(MARK) == os.environ.get(MARK)


def _tolerated_servers(before: Surroundings, after: Surroundings) -> set[int]:
    """Return the fork servers whose owner outlives the test: this process, or a kernel that was there."""
    owners = {os.getpid(), *(process.pid for process in before.processes)}
    tolerated = set()
    for pid in after.fork_servers:
        with contextlib.suppress(psutil.Error):
            owner = _owner(psutil.Process(pid))
            if owner is not None and owner.pid in owners:
                tolerated.add(pid)
    return tolerated


def _own_servers(surroundings: Surroundings) -> set[int]:
    own = set()
    for pid in surroundings.fork_servers:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).ppid() == os.getpid():
                own.add(pid)
    return own


def _descriptors() -> dict[Any, str]:
    return {(number, target): f"{number} -> {target}" for number, target in _targets("/proc/self/fd")}


def _targets(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the descriptors in a folder of `/proc` with what they are of; each test looks at hundreds."""
    for number in os.listdir(folder):  # noqa: PTH208 - as above
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            yield number, os.readlink(f"{folder}/{number}")  # noqa: PTH115


def _new_descriptors(before: Surroundings, after: Surroundings) -> list[str]:
    new = {key: text for key, text in after.descriptors.items() if key not in before.descriptors}
    if _own_servers(after) - before.fork_servers:
        for pattern in FORK_SERVER_DESCRIPTORS:
            held = next((key for key in new if pattern.match(key[1])), None)
            new.pop(held, None)
    return list(new.values())


def _new_listeners(before: Surroundings, after: Surroundings, tolerated: set[int]) -> list[str]:
    """Return the new listening sockets, but for those of tolerated processes, and those in the place of earlier ones.

    A rank of a session that lives for a whole file has a new process group after a failure which broke the old one.
    """
    for pid, count in collections.Counter(pid for pid, _ in before.listeners).items():
        MOST_LISTENERS[pid] = max(count, MOST_LISTENERS.get(pid, 0))
    counts = collections.Counter(pid for pid, _ in after.listeners)
    outliving = {process.pid for process in before.processes} - {os.getpid()}
    return [
        f"{key[1]} of {_describe(process)}"
        for key, process in after.listeners.items()
        if key not in before.listeners
        and key[0] not in tolerated
        and not (key[0] in outliving and counts[key[0]] <= MOST_LISTENERS.get(key[0], 0))
    ]


def _listeners(processes: list[psutil.Process]) -> dict[tuple[int, str], psutil.Process]:
    found: dict[tuple[int, str], psutil.Process] = {}
    for process in [psutil.Process(), *processes]:
        with contextlib.suppress(OSError):
            folder = f"/proc/{process.pid}"
            network = os.readlink(f"{folder}/ns/net")  # noqa: PTH115
            sockets = [target for _, target in _targets(f"{folder}/fd") if target.startswith("socket:")]
            # The kernel needs up to 20 ms to write the tables, so they are read for new sockets alone.
            if any((network, each) not in ADDRESSES for each in sockets):
                ADDRESSES.update({(network, each): None for each in sockets} | _listening(folder, network))
            for address in filter(None, (ADDRESSES[network, each] for each in sockets)):
                found[process.pid, address] = process
    return found


def _listening(folder: str, network: str) -> dict[tuple[str, str], str | None]:
    """Return the sockets that listen in a process' network, each with its address."""
    found: dict[tuple[str, str], str | None] = {}
    for name in ("tcp", "tcp6"):
        for line in _read(f"{folder}/net/{name}").decode().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == LISTENING:
                host, _, port = address.partition(":")
                # The host's words are written as this processor's numbers.
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found[network, f"socket:[{inode}]"] = f"{ipaddress.ip_address(b''.join(words))} port {int(port, 16)}"
    return found


def _files() -> Iterator[Path]:
    folder = tempfile.gettempdir()
    yield from (Path(folder, name) for name in os.listdir(folder) if name.startswith(OUR_FILES))  # noqa: PTH208
    with contextlib.suppress(FileNotFoundError):
        yield from (Path("/dev/shm", name) for name in os.listdir("/dev/shm") if _may_be_ours(name))  # noqa: PTH208


def _may_be_ours(name: str) -> bool:
    """Tell whether a shared-memory file may come from this session, rather than from another program."""
    if not name.startswith((*OUR_FILES, *SHARED_MEMORY)):
        return False
    with contextlib.suppress(psutil.Error):
        pid = re.match(r"torch_(\d+)_", name)
        return pid is None or _is_ours(psutil.Process(int(pid[1])))
    return True


def _others_use(path: Path) -> bool:
    """Return True if a process of another session, such as a parallel worker's, maps this file, or may have made it."""
    is_mapped = False
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                if not _is_ours(process):
                    return True
                is_mapped = True
    # The semaphores of a process that a parallel worker's test killed stay until its resource tracker removes them.
    return not is_mapped and path.name.startswith("sem.") and "PYTEST_XDIST_WORKER" in os.environ


def _settings() -> dict[Any, str]:
    found = {f"environment variable {name}": repr(value) for name, value in os.environ.items()}
    for name in VOLATILE_VARIABLES:
        found.pop(f"environment variable {name}", None)
    found["working directory"] = str(Path.cwd())
    for number in signal.valid_signals():
        found[f"handler of signal {int(number)}"] = repr(signal.getsignal(number))
    return found
