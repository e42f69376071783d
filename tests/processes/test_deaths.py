"""Deaths of other processes than ranks: the kernel, the fork server, the supervisor."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from notebook_launcher import InternalError, notebook_launch
from tests.support.kernels import PATIENCE, Kernel
from tests.support.waiting import until
from tests.support.warm_kernels import FIRST, takes_less_than, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

SUPERVISOR_IS_GONE = r"(?s)the supervisor of this run is gone \(.*\); its ranks .* Launch again, and if this happens"
LOOPING = """
def looping():
    import torch
    from torch.utils.data import DataLoader
    from multiprocessing import Process
    Process(target=time.sleep, args=(600,)).start()
    os.spawnlp(os.P_NOWAIT, "setsid", "setsid", "sleep", "600")
    batches = iter(DataLoader(range(10**9), num_workers=1))
    next(batches)
    torch.distributed.barrier()
    print("up", flush=True)
    for batch in batches: pass
"""

HOLDER = """
if not (holder := os.fork()):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        signal.pause()
print(holder)
"""


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def module_kernel() -> Iterator[Kernel]:
    """A warm kernel, which ends normally after all tests, and leaves no fork server."""
    with warm_kernel() as kernel:
        yield kernel
        family = below(kernel.pid)
        assert family
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert not [process for process in alive if is_alive(process)], alive


def test_killed_kernel_takes_everything_with_it() -> None:
    """Also where a fork of the kernel lives on, which has copies of its channels."""

    def attempt() -> float:
        with Kernel() as kernel:
            kernel.execute(FIRST + LOOPING)
            holder = psutil.Process(int(kernel.execute(HOLDER).stdout))
            cell = kernel.start(
                "waits = [launch(looping, 1, start_method=way) for way in ('spawn', 'forkserver', 'fork')]\n"
                "for each in waits: each.result()"
            )
            kernel.wait(cell, until=lambda outcome: outcome.done or outcome.stdout.count("up") >= 3)
            family = [process for process in below(kernel.pid) if process != holder]
            # Of each run a supervisor, a rank, and the rank's loader worker, child and setsid child.
            assert len(family) >= 1 + 3 * 5
            began = time.monotonic()
            kernel.kill()
            # Whoever inherits the dead (process 1) may not have reaped them yet.
            while any(is_alive(process) for process in family):
                assert time.monotonic() - began < PATIENCE, family
            seconds = time.monotonic() - began
            assert is_alive(holder)
            holder.kill()
            return seconds

    assert takes_less_than(2, attempt)


def test_processes_that_a_rank_started_end_with_it(kernel: Kernel) -> None:
    outcome = kernel.execute(LOOPING + "\nnotebook_launch(looping, 2, timeout=2)")
    assert (outcome.error or "").startswith("RunTimeoutError")


@pytest.mark.slow
def test_semaphores_that_fresh_processes_share_by_name_go_with_their_rank(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def killed():\n"
        "    from torch.utils.data import DataLoader\n"
        "    batches = iter(DataLoader(range(100), num_workers=1, multiprocessing_context='spawn'))\n"
        "    next(batches)\n"
        "    print(batches._worker_result_queue._rlock._semlock.name)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "notebook_launch(killed, 1)"
    )
    assert (outcome.error or "").startswith("RankFailedError: rank 0 of 1 was killed by SIGKILL(-9)")
    (name,) = [word for word in outcome.stdout.split() if word.startswith("/mp-")]
    assert not Path(f"/dev/shm/sem.{name[1:]}").exists()


SHARING = """
def shared_memory(ends):
    from multiprocessing.shared_memory import SharedMemory
    print("made", SharedMemory(create=True, size=100).name)
    ends()

def prefetched(ends):
    from torch.utils.data import DataLoader
    torch.multiprocessing.set_sharing_strategy("file_system")
    batches = iter(DataLoader(torch.ones(1000), batch_size=10, num_workers=2))
    next(batches)
    print("made", *[name for name in os.listdir("/dev/shm") if name.startswith("torch_")])
    ends()

def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("sharing", "ends"), [("shared_memory", "killed"), ("prefetched", "int")])
def test_shared_memory_goes_with_its_rank(kernel: Kernel, sharing: str, ends: str) -> None:
    outcome = kernel.execute(SHARING + f"import torch\nnotebook_launch({sharing}, 2, args=({ends},))")
    # torch's manager cleans up and ends 2 seconds after its users.
    until(lambda: not any(process.info["name"] == "torch_shm_manager" for process in psutil.process_iter(["name"])))
    assert (outcome.error is None) == (ends == "int")
    names = [word for word in outcome.stdout.split() if word.startswith(("psm_", "torch_"))]
    assert names
    assert not [name for name in names if Path("/dev/shm", name).exists()]


def test_folders_in_which_workers_listen_go_with_their_killed_rank(kernel: Kernel, tmp_path: Path) -> None:
    outcome = kernel.execute(
        SHARING + "def listening(ends, folder):\n"
        "    import tempfile\n"
        "    from torch.utils.data import DataLoader\n"
        "    tempfile.tempdir = folder\n"
        "    batches = iter(DataLoader(torch.ones(1000), batch_size=10, num_workers=2))\n"
        "    next(batches), next(batches)\n"  # Each worker has sent a batch, and listens.
        "    print(len(os.listdir(folder)), 'folders')\n"
        "    ends()\n"
        f"import torch\nnotebook_launch(listening, 1, args=(killed, {str(tmp_path)!r}))"
    )
    assert (outcome.error or "").startswith("RankFailedError")
    assert "2 folders" in outcome.stdout
    assert list(tmp_path.iterdir()) == []


def test_folder_in_which_the_kernel_listens_stays_when_a_fork_of_it_is_killed(kernel: Kernel, tmp_path: Path) -> None:
    outcome = kernel.execute(
        "import tempfile\n"
        "from multiprocessing import current_process\n"
        "from multiprocessing.connection import Listener\n"
        "def orphaned():\n"
        "    if os.fork() == 0: time.sleep(600)\n"  # It has the kernel's socket, and is killed with the session.
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"before, tempfile.tempdir = tempfile.tempdir, {str(tmp_path)!r}\n"
        "with Listener(family='AF_UNIX') as listener:\n"
        "    try:\n"
        "        notebook_launch(orphaned, 1, start_method='fork')\n"
        "    except RankFailedError as error:\n"
        "        print(type(error).__name__, os.path.exists(listener.address))\n"
        "tempfile.tempdir = before\n"
        "folder = current_process()._config.pop('tempdir')\n"
        "os.rmdir(folder)"
    )
    assert outcome.error is None
    assert "RankFailedError True" in outcome.stdout


def test_killed_fork_server_is_replaced(kernel: Kernel) -> None:
    server = next(process for process in below(kernel.pid) if "forkserver" in " ".join(process.cmdline()))
    server.kill()
    # Its memory takes a while to be given back; until then its deputy, if it has one, would serve the launch.
    until(lambda: not is_alive(server))
    outcome = kernel.execute("notebook_launch(ready, 2)")
    assert outcome.error is None


def add() -> float:
    one = torch.ones(1)
    torch.distributed.all_reduce(one)
    return float(one)


def test_killed_supervisor_is_our_fault_and_leaves_nothing(kernel: Kernel) -> None:
    cell = kernel.start("def sleeping():\n    print('up', flush=True); time.sleep(600)\nnotebook_launch(sleeping, 2)")
    kernel.wait(cell, until=lambda outcome: outcome.done or "up" in outcome.stdout)
    leaders = [process for process in below(kernel.pid) if os.getsid(process.pid) == process.pid]
    ranks = [process for process in leaders if not process.children()]
    supervisor = ranks[0].parent()
    assert supervisor is not None
    supervisor.kill()
    outcome = kernel.wait(cell)
    assert (outcome.error or "").startswith("InternalError: the supervisor of this run is gone")


def test_failing_supervisor_kills_ranks_that_have_no_session_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    me, setsid = os.getpid(), os.setsid

    def hold_ranks() -> None:
        if os.getppid() != me:
            time.sleep(600)
        setsid()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no store today")

    monkeypatch.setattr("os.setsid", hold_ranks)
    monkeypatch.setattr("torch.distributed.TCPStore", refuse)
    with pytest.raises(InternalError, match=SUPERVISOR_IS_GONE):
        notebook_launch(os.getpid, 2, output="none", start_method="fork")


def test_store_before_torch_2_8_is_not_libuv_because_that_takes_over_no_listening_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store: Any = torch.distributed.TCPStore

    def as_before_torch_2_8(*args: Any, use_libuv: bool = True, **options: Any) -> Any:
        if use_libuv and "master_listen_fd" in options:
            raise NotImplementedError("The libuv TCPStore backend does not support initialization with an listen fd.")
        return store(*args, use_libuv=use_libuv, **options)

    monkeypatch.setattr("torch.__version__", "2.7.1+cu126")
    monkeypatch.setattr("torch.distributed.TCPStore", as_before_torch_2_8)
    assert list(notebook_launch(add, 2, output="none", start_method="fork")) == [2.0, 2.0]
