"""Ranks whose GPU fails, as far as that can be tried without one."""

from __future__ import annotations

import builtins
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from notebook_launcher import LaunchConfig, Session, launch, notebook_launch
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.processes.rank import user_function
from notebook_launcher.processes.rank.rendezvous import torchrun_environment
from tests.support.kernels import ROOT


def test_rank_whose_gpu_is_lost_is_replaced_after_its_failure() -> None:
    def number() -> int:
        return os.getpid()

    def fail_on_rank_1() -> None:
        import torch.distributed as dist

        from notebook_launcher.processes.rank import user_function

        if dist.get_rank() == 1:
            user_function.is_broken = lambda: True  # What it asks CUDA is not tried here, only what follows from a yes.
            raise ValueError("device-side assert triggered")

    with Session(2, output="none") as session:
        before = session.run(number)
        with pytest.raises(ValueError, match="device-side assert triggered"):
            session.run(fail_on_rank_1)
        after = session.run(number)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize(("users", "expected"), [({}, "0"), ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, None)])
def test_watchdog_of_nccl_leaves_cuda_errors_to_python(users: dict[str, str], expected: str | None) -> None:
    setup = make_plan(LaunchConfig(num_processes=1)).setup(many_calls=False)
    setup = dataclasses.replace(setup, use_gpu=True, environ=users)
    assert torchrun_environment(setup, 0).get("TORCH_NCCL_RETHROW_CUDA_ERRORS") == expected
    without = dataclasses.replace(setup, use_gpu=False)
    assert "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in torchrun_environment(without, 0)


def test_rank_without_a_gpu_names_the_variable_to_check_waits_for_nothing_and_is_not_broken() -> None:
    program = """
from notebook_launcher.processes.rank import rank_process, user_function
user_function.finish()
import torch
user_function.finish()
print(user_function.is_broken())
rank_process.choose_gpu(3, 3)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "5,5"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"
    assert "RuntimeError: rank 3 sees no GPU, though the driver names some to the kernel" in done.stderr
    assert "CUDA_VISIBLE_DEVICES='5,5' here" in done.stderr


class Devices:
    """Three devices in the place of CUDA's, of which the process uses the first and the last; `log`: what is asked.

    They show which devices are asked for what, in which order, and nothing about CUDA.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: str = "", looks: int = 0) -> None:
        self.log: list[str] = []
        self._fails, self._looks = fails, looks
        cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 3,
            current_stream=lambda device: SimpleNamespace(name=device, query=lambda: self._query(device)),
            synchronize=lambda device: self._ask(f"device {device}"),
            Event=lambda *, blocking: SimpleNamespace(
                record=lambda stream: self._ask(f"event of {stream.name}"), synchronize=lambda: self._ask("event")
            ),
        )
        pretended = SimpleNamespace(cuda=cuda, _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda device: device != 1))
        monkeypatch.setitem(sys.modules, "torch", pretended)

    def _ask(self, name: str) -> None:
        self.log.append(name)
        if name == self._fails:
            raise RuntimeError("device-side assert triggered")

    def _query(self, device: int) -> bool:
        self._looks -= 1
        self._ask(f"stream of {device}")
        return self._looks < 0


@pytest.mark.parametrize("fails", ["event of 0", "device 0", "device 2"])
def test_failure_on_any_stream_of_any_device_is_the_functions(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, fails=fails)
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        user_function.finish()


def test_loss_of_any_device_is_found_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, fails="stream of 2")
    assert user_function.is_broken()
    devices = Devices(monkeypatch, looks=2)  # A kernel that was still queued when the function failed may fail yet.
    assert not user_function.is_broken()
    assert devices.log == ["stream of 0"] * 3 + ["stream of 2"]
    began = time.monotonic()
    Devices(monkeypatch, looks=1_000_000)  # A collective without a peer is never done.
    assert not user_function.is_broken()
    assert time.monotonic() - began < 5 * user_function.LAST_KERNELS


def test_wait_for_a_device_ends_with_an_interrupt() -> None:
    is_done = threading.Event()
    interrupt = threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            user_function.run_apart(lambda: is_done.wait(60))
    finally:
        signal.signal(signal.SIGINT, before)
        is_done.set()
        interrupt.join()


def test_word_of_a_watchdog_does_not_outlive_its_group() -> None:
    def underlying() -> Any:
        from torch.distributed import distributed_c10d as c10d

        store = c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return store

    def give_up() -> None:
        import torch.distributed as dist

        underlying().set("exception_dump", "1")
        dist.destroy_process_group()

    def is_there() -> bool:
        return bool(underlying().check(["exception_dump"]))

    with Session(2, output="none") as session:
        session.run(give_up)
        assert list(session.run(is_there)) == [False, False]


def test_memory_of_a_failed_call_is_released_before_the_next_one() -> None:
    def fail() -> None:
        import gc
        import weakref

        import torch

        gc.disable()
        held = torch.ones(1000)
        builtins.held = weakref.ref(held)  # type: ignore[attr-defined]
        try:
            int("on purpose")
        except ValueError as error:
            kept = error  # The traceback holds this frame, and this frame the error: a cycle, which holds the tensor.
        raise ValueError(f"on purpose, after {kept!r}")

    def is_held() -> bool:
        return builtins.held() is not None  # type: ignore[attr-defined]

    with Session(1, output="none") as session:
        with pytest.raises(ValueError, match="on purpose"):
            session.run(fail)
        assert list(session.run(is_held)) == [False]


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_rank_can_initialise_cuda_whatever_the_fork_server_has_imported() -> None:
    """A fork of a process that had asked CUDA for anything could not; there is no driver, so torch says only that."""

    def initialise() -> tuple[str, bool]:
        try:
            torch.cuda.init()
        except RuntimeError as error:
            return str(error), "torch._dynamo" in sys.modules
        return "initialised", "torch._dynamo" in sys.modules

    is_prepared = False
    while not is_prepared:  # Then the idle server has imported torch's compiler, which looks at GPUs at its use.
        told, is_prepared = notebook_launch(initialise, 1, devices="cpu", output="none")[0]
        assert told == "initialised" or "no NVIDIA driver" in told
        time.sleep(0.3)  # The server imports more when it is idle for 0.2 s.


def test_files_of_nccls_connections_go_with_the_rank_that_is_killed() -> None:
    def hold() -> None:
        import mmap
        import signal
        import time
        from pathlib import Path

        from notebook_launcher import report

        file = Path(f"/dev/shm/nccl-{os.getpid()}").open("w+b")  # noqa: SIM115 - as NCCL does
        file.truncate(4096)
        builtins.kept = mmap.mmap(file.fileno(), 4096)  # type: ignore[attr-defined]
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        report(begun=1)
        time.sleep(60)

    run = launch(hold, 1, output="none")
    while not run.metrics:
        assert not run.wait(0.01), run.exception()
    file = Path(f"/dev/shm/nccl-{run.ranks[0].pid}")
    assert file.exists()
    assert run.stop() == "kill"
    assert not file.exists()
