"""Stacks and samples of what real ranks dump, in a real process group that is really stuck."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import notebook_launcher
from notebook_launcher import Session, launch
from notebook_launcher.drawing.reported import flame_svg
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.inspection.stacks import (
    RankStack,
    Samples,
    StackFrame,
    Stacks,
    parse_stacks,
    split_dumps,
)
from notebook_launcher.processes.rank import rank, user_function
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable


def stuck(function: Callable[[], Any], wanted: Callable[[Stacks], Any], num_processes: int = 2) -> Stacks:
    """Return the stacks of a run as soon as they are as wanted."""
    run = launch(function, num_processes, devices="cpu", output="none", monitor=False)
    try:
        stacks: Stacks = until(lambda: wanted(found := run.stacks()) and found)
        return stacks
    finally:
        run.stop(at_once=True)


def here(stack: RankStack) -> StackFrame:
    assert stack.here is not None
    return stack.here


def functions(stack: RankStack) -> list[str]:
    assert stack.main is not None
    return [frame.function for frame in stack.main.user_frames]


def calls(found: Stacks) -> list[str | None]:
    return [stack.waiting_in for stack in found]


def test_stacks_name_waiting_and_missing_ranks() -> None:
    def average() -> None:
        dist.all_reduce(torch.ones(1))

    def train() -> None:
        if dist.get_rank() == 0:
            average()
        time.sleep(60)

    sleeps = "time.sleep(60)"
    found = stuck(train, lambda found: calls(found) == ["all_reduce", None] and sleeps in found.verdict)
    reduced, called = average.__code__.co_firstlineno + 1, train.__code__.co_firstlineno + 2
    assert str(found).split("\n")[0] == (
        f"rank 0 waits in all_reduce ({__file__}, line {reduced}); "
        f"rank 1 is not in it: train, {__file__}, line {called + 1}: time.sleep(60)"
    )
    assert str(found[0].here) == f"average, {__file__}, line {reduced}: dist.all_reduce(torch.ones(1))"
    assert functions(found[0]) == ["average", "train"]
    assert f"  {__file__}, line {called}, in train\n    average()\n" in str(found)
    assert found._repr_html_().startswith("<p>rank 0 waits in all_reduce (")


def train(name: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(1, 1)) if name == "backward (gradient all-reduce)" else None
    if dist.get_rank() == 0:
        if model is not None:
            model(torch.ones(1, 1)).sum().backward()
        elif name == "all_gather_object":
            dist.all_gather_object([None] * 2, 1)
        elif name == "DistributedDataParallel(...)":
            DistributedDataParallel(torch.nn.Linear(1, 1))
        else:
            dist.all_reduce(torch.ones(1), async_op=True).wait()


def test_stacks_name_the_call_in_which_a_rank_waits_and_that_another_has_returned() -> None:
    ways = ("all_gather_object", "wait() of an asynchronous call", "DistributedDataParallel(...)")
    with Session(2, output="none", devices="cpu") as session:
        for name in (*ways, "backward (gradient all-reduce)"):
            run = session.launch(train, args=(name,))
            until(lambda: calls(found := run.stacks()) == [name, None] and "rank 1 runs nothing" in found.verdict)  # noqa: B023
            run.stop()


def test_main_thread_comes_first_and_others_follow() -> None:
    def größe_京() -> None:  # noqa: N802, PLC2401 - the dump escapes such a name
        threading.Thread(target=lambda: time.sleep(60), daemon=True).start()
        time.sleep(60)

    (stack,) = stuck(größe_京, lambda found: str(found).count("    time.sleep(60)") == 1 < len(found[0].threads), 1)
    assert here(stack).function == "größe_京"
    assert "  thread 0x" in str(Stacks([stack]))


@pytest.mark.parametrize(
    ("line", "function", "waits"),
    [
        ("work.wait()", "train", True),
        ("dist.all_reduce(x, async_op=True).wait(timeout)", "train", True),
        ("y = f(lambda: x @ x, work.wait())", "train", True),
        ("run(lambda work: work.wait())", "<lambda>", True),
        ("time.sleep(3); work.wait()", "train", False),
        ("x = 2 * x  # before work.wait()", "train", False),
        ("run = launch(lambda: [x @ x for _ in many]); run.wait()", "<lambda>", False),
        ("run(lambda work: work.wait(), x @ x)", "train", False),
    ],
)
def test_line_with_the_wait_of_something_else_is_no_wait(tmp_path, line, function, waits):
    program = tmp_path / "program.py"
    program.write_text(f"{line}\n")
    stack = parse_stacks(0, text_dump((str(program), 1, function)))
    assert stack.waiting_in == ("wait() of an asynchronous call" if waits else None)


PACKAGE = Path(notebook_launcher.__file__).parent


def text_dump(*frames: tuple[str, int, str]) -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join(["Current thread 0x00007f0000000000 [python] (most recent call first):", *lines])


def test_frames_of_the_package_and_of_the_parent_process_are_dropped():
    stack = parse_stacks(
        3,
        text_dump(
            ("/home/u/train.py", 7, "train"),
            (str(rank.__file__), 9, "serve"),
            (str(rank.__file__), 9, "run_rank"),
            ("/home/u/notebook.py", 1, "<module>"),
        ),
    )
    (thread,) = stack.threads
    assert (thread.name, thread.frames) == ("python", (StackFrame("train", "/home/u/train.py", 7),))


def test_code_that_the_compiler_generates_is_not_the_users_line():
    compiling = [
        ("<string>", 2, "guard"),
        ("/x/site-packages/torch/_dynamo/guards.py", 9, "compile"),
        ("<string>", 7, "__init__"),
        ("/x/site-packages/torch/_dynamo/convert_frame.py", 9, "compile"),
    ]
    for user in ("/home/u/train.py", "<string>"):  # A file, and `python -c`.
        stack = parse_stacks(0, text_dump(*compiling, (user, 7, "train"), (user, 9, "<module>")))
        assert functions(stack) == ["train", "<module>"]
        assert (here(stack).place, stack.threads[0].is_compiling) == (f"{user}, line 7", True)


def test_idle_and_silent_ranks_are_named():
    idle = parse_stacks(0, text_dump((str(rank.__file__), 9, "run_rank")))
    assert Stacks([idle, RankStack(1, ())]).verdict == (
        "rank 0 runs nothing: its function has ended; rank 1 did not answer"
    )
    assert str(Stacks([idle])) == Stacks([idle]).verdict
    assert Stacks([idle]).in_past_tense == "rank 0 ran nothing"
    assert str(Stacks()) == "no rank is up yet"


@pytest.mark.parametrize("line", ["total = loss.item()", "x = y.to('cpu')", "if bool(flag):", "stream.synchronize()"])
def test_line_that_reads_from_a_gpu_is_a_wait_of_a_rank_that_uses_one(tmp_path: Path, line: str) -> None:
    """With NCCL a rank waits for its peers there. No GPU is used: this is about the stack."""
    file = tmp_path / "train.py"
    file.write_text(f"import torch\n{line}\nloss.backward()\n")
    reads, others = (text_dump((str(file), number, "train")) for number in (2, 3))
    assert calls(Stacks.parse({0: reads, 1: others}, uses_gpu=True)) == ["CUDA synchronization", None]
    assert calls(Stacks.parse({0: reads, 1: others})) == [None, None]


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [
        ("torch/cuda/streams.py", "synchronize", "CUDA synchronization"),
        ("torch/cuda/__init__.py", "synchronize", "CUDA synchronization"),
        ("torch/cuda/__init__.py", "_lazy_init", None),
        ("torch/_tensor_str.py", "_tensor_str", "CUDA synchronization"),
        ("torch/amp/grad_scaler.py", "_maybe_opt_step", "CUDA synchronization"),
        ("torch/nn/modules/linear.py", "forward", None),
    ],
)
def test_functions_of_torch_that_wait_for_a_gpu_are_known(file: str, function: str, expected: str | None) -> None:
    """The files are those of the installed torch, so that a move is noticed."""
    packages = Path(torch.__file__).parents[1]
    assert function in (packages / file).read_text()
    dump = text_dump((f"/usr/lib/python3/dist-packages/{file}", 7, function), ("/home/u/train.py", 7, "train"))
    assert calls(Stacks.parse({0: dump}, uses_gpu=True)) == [expected]


def test_wait_for_the_gpu_at_the_end_of_a_call_is_one_and_no_other_frame_of_the_package_is_shown() -> None:
    dump = text_dump(
        (user_function.__file__, 77, "run_apart"), (user_function.__file__, 50, "finish"), (rank.__file__, 222, "_call")
    )
    (stack,) = Stacks.parse({0: dump}, uses_gpu=True)
    assert stack.waiting_in == "CUDA synchronization"
    assert [frame.function for frame in stack.threads[0].frames] == ["finish"]


def test_fence_of_updates_is_a_wait_in_the_users_line() -> None:
    dump = text_dump(
        ("/x/site-packages/torch/cuda/streams.py", 7, "synchronize"),
        (f"{PACKAGE}/training/requests.py", 9, "pass_update"),
        ("/home/u/train.py", 7, "train"),
    )
    (stack,) = Stacks.parse({0: dump})
    assert stack.waiting_in == "CUDA synchronization"
    assert here(stack).place == "/home/u/train.py, line 7"


def spin() -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


def uneven() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        spin()
    dist.barrier()


def at_work(samples: Samples) -> Samples | None:
    """Return samples of a time at which rank 0 waited in the barrier, and rank 1 worked, on a busy machine too."""
    drawn = flame_svg(samples[:1]), flame_svg(samples[1:])
    is_at_work = all(rank.num_samples > 2 and rank.wait_share == 0 for rank in samples[1:])
    found = "barrier: " in drawn[0] and "uneven, line" in drawn[1] and "spin, line" in drawn[1]
    return samples if found and samples[0].wait_share == 1 and is_at_work else None


def test_samples_separate_work_from_waits(tmp_path: Path) -> None:
    run = launch(uneven, 2, output="none", monitor=False)
    samples: Samples = until(lambda: at_work(run.sample(0.2)))
    run.stop()
    assert ", 100 % of them waits for other ranks\n" in str(samples)
    assert re.search(rf"rank 1: \d+ samples\n  [\d.]+ % {re.escape(__file__)}, line 2\d", str(samples))
    samples.save(tmp_path / "flame.svg")
    assert (tmp_path / "flame.svg").read_text() == samples.to_svg()
    assert "<img" in samples._repr_html_()
    with pytest.raises(CallOrderError, match="the run is over"):
        run.sample(1)


DUMP = """Thread 0x2 (most recent call first):
  File "worker.py", line 3 in work

Current thread 0x1 (most recent call first):
  File "train.py", line {line} in step
  File "train.py", line 9 in train
"""


def test_dumps_of_one_file_are_split() -> None:
    dumps = [DUMP.format(line=line) for line in (4, 5, 5)]
    assert [dump.split() for dump in split_dumps("".join(dumps))] == [dump.split() for dump in dumps]
    assert list(split_dumps("no dump")) == []
    (flame,) = Samples.parse({3: "".join(dumps)})
    assert (flame.rank, flame.num_samples) == (3, 3)
    (train,) = flame.frames
    assert [(frame.name, frame.count) for frame in train.children] == [("step, line 5", 2), ("step, line 4", 1)]
