"""Collectives that do not match: named with `check_collectives=True`, and suggested without."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_launcher import Accelerator, RankFailedError, RunTimeoutError, notebook_launch
from notebook_launcher.kernel.inspection.hangs import FLIGHT_RECORDER, SUGGESTION, suggestion
from notebook_launcher.kernel.inspection.stacks import Stacks

QUIET: dict[str, Any] = {"output": "none", "monitor": False, "runs_folder": None}
CALLS = {0: "all_reduce", 1: "barrier"}


def leave_early() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def train_and_reduce_by_rank() -> Any:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(torch.nn.Linear(2, 2))
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for model in (prepared, wrapped):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    dist.all_reduce(torch.ones(10 + dist.get_rank() // 2))


def test_mismatch_names_the_shapes_and_the_line_of_each_rank_also_after_training_with_ddp() -> None:
    with pytest.raises(RuntimeError, match="Detected mismatch") as caught:
        notebook_launch(train_and_reduce_by_rank, 3, devices="cpu", check_collectives=True, **QUIET)
    shown = "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]
    line = f"{__file__}, line {train_and_reduce_by_rank.__code__.co_firstlineno + 6}: dist.all_reduce(torch.ones("
    assert "The ranks were in collectives that do not match:\n" in shown
    assert f"\n  ranks 0, 1: all_reduce of float [10], {line}" in shown
    assert f"\n  rank 2: all_reduce of float [11], {line}" in shown


@pytest.mark.parametrize(("is_checked", "words"), [(False, SUGGESTION), (True, "")])
def test_suggestion_is_for_launches_without_the_check(is_checked: bool, words: str) -> None:  # a parameter
    frame = '  File "/torch/distributed/distributed_c10d.py", line 1 in {}\n'
    dumps = {rank: f"Thread 0x1 (most recent call first):\n{frame.format(call)}" for rank, call in CALLS.items()}
    assert suggestion(Stacks.parse(dumps), is_checked=is_checked, backend="gloo") == words
    with_nccl = suggestion(Stacks.parse(dumps), is_checked=is_checked, backend="nccl").splitlines()
    assert with_nccl == [*filter(None, [words]), FLIGHT_RECORDER]
    assert suggestion(Stacks.parse({0: dumps[0]}), is_checked=is_checked, backend="nccl") == ""


def test_run_that_times_out_before_it_has_a_rank_is_a_timeout() -> None:
    with pytest.raises(RunTimeoutError, match=r"timeout=0\.001 s\. No rank had begun the function yet"):
        notebook_launch(leave_early, 2, timeout=0.001, **QUIET)


def test_rank_that_returned_is_not_a_mismatch() -> None:
    for is_checked in (True, False):
        with pytest.raises(RankFailedError) as caught:
            notebook_launch(leave_early, 2, check_collectives=is_checked, **QUIET)
        words = str(caught.value)
        assert words.startswith("rank 1 has returned; rank 0 still waited in barrier, ")
        assert ": dist.barrier()" in words
        assert (SUGGESTION in words) is not is_checked
        shown = "\n".join(vars(caught.value)["_render_traceback_"]())
        assert shown.startswith("rank 1 has returned; rank 0 still waited in barrier")
        assert shown.endswith(f"RankFailedError: {words}")
        assert "do not match" not in shown


def reduce_in_backward() -> None:
    accelerator = Accelerator(cpu=True)
    loss = accelerator.prepare(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum()
    if dist.get_rank() == 0:
        accelerator.backward(loss)


def gather_alone() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))


@pytest.mark.parametrize(
    ("function", "call"),
    [(reduce_in_backward, r"backward, .*: accelerator\.backward\(loss\)"), (gather_alone, "gather, .*: accelerator")],
)
def test_rank_left_waiting_in_an_operation_of_ours_is_at_the_users_line(function: Any, call: str) -> None:
    with pytest.raises(RankFailedError, match=rf"^rank 1 has returned; rank 0 still waited in {call}"):
        notebook_launch(function, 2, **QUIET)


def abort_with(words: str) -> None:
    print(f"  what():  {words}", file=sys.stderr, flush=True)
    os.abort()


@pytest.mark.parametrize(
    "words",
    [
        "Invalid argument: 1004 vs 4. Is there a distributed collective mismatch in your code?",  # torch 2.13
        "[enforce fail at tcp/pair.cc:446] op.preamble.length <= op.nbytes. 1004 vs 4",  # torch 2.6
    ],
)
def test_abort_of_gloo_suggests_the_check(words: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        notebook_launch(abort_with, 1, args=(words,), **QUIET)
    assert SUGGESTION in str(caught.value)
