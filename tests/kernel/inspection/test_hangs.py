"""Waits in collectives that others have not entered: real ranks, watched from outside."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from notebook_launcher import Session, launch, notebook_launch, report
from notebook_launcher.engines.board import Pulse
from notebook_launcher.kernel.inspection.hangs import HangWatch
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.kernel.run.handle import Run

SOON = 0.3
"""Seconds of waiting that count in these tests."""
LINE = re.escape(__file__) + r", line \d+"


@contextlib.contextmanager
def launched(function: Callable[..., Any], *args: Any, hang_notice: float | None = SOON) -> Iterator[Run]:
    """A run on two ranks that is stopped at the end, if it has not ended by then."""
    run = launch(function, 2, args=args, hang_notice=hang_notice, output="none")
    try:
        yield run
    finally:
        run.stop(at_once=True)


def waiting(run: Run, words: str = "") -> str:
    """Return what the run says of its wait, once it says something with these words."""
    told: str = until(lambda: words in (told := run.snapshot().waiting) and told)
    return told


def wait_for(path: Path) -> None:
    # Here and not in another file, because the ranks' stacks show this line.
    while not path.exists():
        time.sleep(0.01)


def late_rank(gate: Path) -> None:
    if dist.get_rank() == 1:
        wait_for(gate)
    dist.all_reduce(torch.ones(1))
    report(loss=1.0)
    wait_for(gate.with_suffix(".end"))


def test_wait_shows_in_state_and_ranks_until_the_late_rank_comes(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with launched(late_rank, gate) as run:
        told = waiting(run, "time.sleep")
        assert re.fullmatch(
            rf"rank 0 has waited [\d.]+ m?s in all_reduce \({LINE}\); rank 1 is at line \d+: time\.sleep\(0\.01\)", told
        )
        assert run.state == "waiting"
        first, second = run.ranks
        assert (first.state, second.state) == ("waiting", "running")
        assert first.waited is not None
        assert first.waited >= SOON
        assert second.waited is None
        assert re.fullmatch(rf"in all_reduce \({LINE}\)", first.where)
        assert re.fullmatch(rf"at {LINE}: time\.sleep\(0\.01\)", second.where)
        gate.touch()
        until(lambda: run.state == "running" and len(run.metrics) == 2)
        assert run.snapshot().waiting == ""
        assert [(rank.state, rank.waited, rank.where) for rank in run.ranks] == [("running", None, "")] * 2
        gate.with_suffix(".end").touch()
        run.result(20)
        assert run.snapshot().state == "done"


def cross_over(gate: Path) -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        wait_for(gate)
        dist.all_gather_object([None, None], torch.ones(1))


def test_ranks_in_different_collectives_are_all_named(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with launched(cross_over, gate) as run:
        waiting(run, "time.sleep")
        gate.touch()
        assert re.fullmatch(
            rf"rank 0 has waited [\d.]+ m?s in barrier \({LINE}\); "
            rf"rank 1 has waited [\d.]+ m?s in all_gather_object \({LINE}\)",
            waiting(run, "rank 1 has waited"),
        )
        assert [rank.state for rank in run.ranks] == ["waiting", "waiting"]


def receive_only() -> None:
    dist.recv(torch.ones(1), src=1 - dist.get_rank())


def test_ranks_that_all_wait_for_each_other_are_named_though_each_has_entered() -> None:
    with launched(receive_only) as run:
        assert re.fullmatch(rf"ranks 0, 1 have waited [\d.]+ m?s in recv \({LINE}\)", waiting(run, "ranks 0, 1"))


def backward_on_one(gate: Path) -> None:
    import torch._dynamo.convert_frame  # takes long

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()

    def slow_backend(graph: Any, _inputs: Any) -> Any:
        wait_for(gate)
        return graph.forward

    if dist.get_rank() == 1:
        torch.compile(torch.nn.Linear(1, 1), backend=slow_backend)(torch.ones(1, 1))
    loss.backward()


def test_rank_that_compiles_while_others_wait_is_named_as_compiling(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with launched(backward_on_one, gate) as run:
        assert re.fullmatch(
            rf"rank 0 has waited [\d.]+ m?s in backward \(gradient all-reduce\) \({LINE}\); "
            r"rank 1 is compiling \(torch\.compile\) at line \d+: .*",
            waiting(run, "compiling"),
        )
        gate.touch()
        run.result(60)


def dump_of(*frames: str) -> str:
    return "\n".join(["Thread 0x00007f0000000000 [python] (most recent call first):", *frames])


def watched(tmp_path: Path, waits: tuple[bool, bool], *, uses_gpu: bool, is_asleep: bool) -> str:
    """Return the notice about two ranks that have not moved; those that wait read a number from a device."""
    file = tmp_path / "train.py"
    file.write_text("total = loss.item()\ntime.sleep(60)\n")
    dumps = {rank: dump_of(f'  File "{file}", line {1 if waits[rank] else 2} in train') for rank in (0, 1)}
    watch = HangWatch(SOON, 0.0, uses_gpu=uses_gpu)
    for step in range(1, 60):
        ticks = 0 if is_asleep else 10 * step  # NCCL and CUDA wait in a busy loop, unless they are told not to.
        pulses = {rank: Pulse(num_sleeps=7, is_asleep=is_asleep, ticks=ticks) for rank in (0, 1)}
        told = watch.poll(step / 10, lambda: pulses, {}, lambda ranks: {rank: dumps[rank] for rank in ranks})  # noqa: B023
        if told:
            return told
    return ""


@pytest.mark.parametrize("is_asleep", [False, True])
def test_rank_that_waits_for_its_gpu_while_a_peer_is_elsewhere_is_named(tmp_path: Path, *, is_asleep: bool) -> None:
    told = watched(tmp_path, (True, False), uses_gpu=True, is_asleep=is_asleep)
    assert re.fullmatch(
        r"rank 0 has waited [\d.]+ m?s in CUDA synchronization \(.*train\.py, line 1\); "
        r"rank 1 is at line 2: time\.sleep\(60\)",
        told,
    )
    assert not watched(tmp_path, (True, False), uses_gpu=False, is_asleep=is_asleep)
    # Ranks that all wait for their GPUs may be computing.
    assert not watched(tmp_path, (True, True), uses_gpu=True, is_asleep=is_asleep)


def return_early() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_rank_of_a_session_that_has_returned_is_named_as_returned() -> None:
    with Session(2, output="none", hang_notice=SOON) as session:
        run = session.launch(return_early)
        assert re.fullmatch(
            rf"rank 0 has waited [\d.]+ m?s in barrier \({LINE}\); rank 1 has returned", waiting(run, "has returned")
        )
        run.stop()


def asked_for_stacks(pid: int | str) -> int:
    """Return how many bytes of stacks a rank has been asked for."""
    names = [file for file in Path(f"/proc/{pid}/fd").iterdir() if file.exists() and "stacks" in str(file.readlink())]
    return sum(file.stat().st_size for file in names)


def uneven_steps(seconds: float) -> int:
    until = time.monotonic() + seconds
    going = torch.ones(1)
    while going:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        going[0] = time.monotonic() < until
        dist.broadcast(going, src=0)
    return asked_for_stacks("self")


def test_ranks_of_different_speed_are_not_even_asked_for_their_stacks() -> None:
    results = notebook_launch(uneven_steps, 2, args=(4 * SOON,), hang_notice=SOON, output="none")
    assert list(results) == [0, 0]


def read_once(fifo: Path) -> bytes:
    # One sleep, as that of a loop that waits for its data.
    with fifo.open("rb", buffering=0) as source:
        return source.read(1)


def test_ranks_that_wait_for_anything_else_are_asked_and_left_alone(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Opened for both, it opens at once and keeps the readers waiting.
    with fifo.open("r+b", buffering=0) as ours, launched(read_once, fifo) as run:
        until(lambda: all(rank.pid and asked_for_stacks(rank.pid) for rank in run.ranks))
        assert (run.state, run.snapshot().waiting) == ("running", "")
        ours.write(b"go")
        assert sorted(run.result(20)) == [b"g", b"o"]


def test_hang_notice_none_reports_no_wait(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with launched(late_rank, gate, hang_notice=None) as run:
        until(lambda: "all_reduce" in run.stacks().verdict)
        time.sleep(2 * SOON)  # Nothing is to happen, so there is nothing to wait for.
        assert (run.state, run.snapshot().waiting) == ("running", "")
