"""Stacks read from what real processes dump, with a real process group that is really stuck."""

from __future__ import annotations

import linecache
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import notebook_launcher
from notebook_launcher import Session
from notebook_launcher.kernel.inspection import stacks
from notebook_launcher.kernel.inspection.stacks import RankStack, StackFrame, Stacks, ThreadStack, parse_stacks
from notebook_launcher.processes.rank import rank, user_function
from notebook_launcher.travel import cells
from tests.support.kernels import ROOT, Kernel

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = """
import faulthandler, os, signal, sys, threading, time
rank, dump, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
faulthandler.register(signal.SIGUSR1, file=open(dump, "a"), all_threads=True)
{setup}
print("ready", flush=True)
{body}
"""

GROUP = """
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch, torch.distributed as dist
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + store)
tensor = torch.ones(2)
"""


def stuck(
    tmp_path: Path, body: str, *, until: Callable[[Stacks], bool], setup: str = "", num_processes: int = 1
) -> Stacks:
    """Run the program in some processes until their dumps show what is wanted."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(setup=textwrap.dedent(setup), body=textwrap.dedent(body)))
    files = {rank: tmp_path / f"dump{rank}" for rank in range(num_processes)}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), file, tmp_path / "store"], stdout=subprocess.PIPE, env=env
        )
        for rank, file in files.items()
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while True:
            found = Stacks.parse({rank: file.read_text() for rank, file in files.items()})
            if all(stack.here for stack in found) and until(found):
                return found
            assert time.monotonic() < deadline, found
            for file, process in zip(files.values(), processes, strict=True):
                file.write_text("")
                process.send_signal(signal.SIGUSR1)
            # Nothing says when a dump is complete.
            select.select([], [], [], 0.05)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def here(stack: RankStack) -> StackFrame:
    assert stack.here is not None
    return stack.here


def main(stack: RankStack) -> ThreadStack:
    assert stack.main is not None
    return stack.main


def calls(found: Stacks) -> list[str | None]:
    return [stack.waiting_in for stack in found]


def test_stacks_name_waiting_and_missing_ranks(tmp_path):
    body = """
    def average(tensor):
        dist.all_reduce(tensor)
    def train():
        if rank == 0:
            average(tensor)
        time.sleep(60)
    train()
    """
    found = stuck(
        tmp_path,
        body,
        until=lambda found: calls(found) == ["all_reduce", None] and here(found[1]).function == "train",
        setup=GROUP,
        num_processes=2,
    )
    program = tmp_path / "program.py"
    assert str(found).split("\n")[0] == (
        f"rank 0 waits in all_reduce ({program}, line 14); "
        f"rank 1 is not in it: train, {program}, line 18: time.sleep(60)"
    )
    assert str(found[0].here) == f"average, {program}, line 14: dist.all_reduce(tensor)"
    assert [frame.function for frame in main(found[0]).user_frames] == ["average", "train", "<module>"]
    assert f"  {program}, line 17, in train\n    average(tensor)\n" in str(found)
    assert found._repr_html_().startswith("<p>rank 0 waits in all_reduce (")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("dist.all_gather_object([None] * 2, 1)", "all_gather_object"),
        ("dist.all_reduce(tensor, async_op=True).wait()", "wait() of an asynchronous call"),
        ("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))", "DistributedDataParallel(...)"),
    ],
)
@pytest.mark.slow
def test_stacks_name_the_call_in_which_a_rank_waits(tmp_path, call, name):
    body = f"if rank == 0: {call}\ntime.sleep(60)"
    stuck(tmp_path, body, until=lambda found: calls(found) == [name, None], setup=GROUP, num_processes=2)


@pytest.mark.slow
def test_backward_that_waits_for_gradients_is_a_wait(tmp_path):
    setup = GROUP + "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
    body = "loss = model(torch.ones(1, 1)).sum()\nif rank == 0: loss.backward()\ntime.sleep(60)"
    expected = ["backward (gradient all-reduce)", None]
    stuck(tmp_path, body, until=lambda found: calls(found) == expected, setup=setup, num_processes=2)


@pytest.mark.parametrize(
    ("line", "function", "waits"),
    [
        ("work.wait()", "train", True),
        ("for work in works: work.wait()", "train", True),
        ("dist.all_reduce(x, async_op=True).wait(timeout)", "train", True),
        ("y = f(lambda: x @ x, work.wait())", "train", True),
        ("work.wait(  # of a longer statement", "train", True),
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


def test_main_thread_comes_first_and_others_follow(tmp_path):
    body = """
    started = threading.Event()
    def work():
        started.set()
        time.sleep(60)
    threading.Thread(target=work, daemon=True).start()
    started.wait()
    time.sleep(60)
    """
    (stack,) = stuck(tmp_path, body, until=lambda found: str(found).count("    time.sleep(60)") == 2)
    first, other = stack.threads
    assert [frame.function for frame in first.user_frames] == ["<module>"]
    assert [frame.function for frame in other.user_frames] == ["work"]
    assert "  thread 0x" in str(Stacks([stack]))


def test_names_beyond_ascii_are_unescaped(tmp_path):
    body = "def größe_京(): time.sleep(60)\ngröße_京()"
    stuck(tmp_path, body, until=lambda found: here(found[0]).function == "größe_京")


PACKAGE = Path(notebook_launcher.__file__).parent
LIBRARY = "/usr/lib/python3.11/threading.py"


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
    assert main(stack).frames == (StackFrame("train", "/home/u/train.py", 7),)
    assert main(stack).name == "python"


def test_generated_code_without_lines_is_not_where_a_rank_is() -> None:
    """torch.compile runs such code on Python 3.13."""
    train = StackFrame("train", "/home/u/train.py", 7)
    stack = RankStack(0, (ThreadStack(1, "MainThread", (StackFrame("__init__", "__init__", 0), train)),))
    assert stack.here == train


def test_idle_and_silent_ranks_are_named():
    idle = parse_stacks(0, text_dump((str(rank.__file__), 9, "run_rank")))
    assert Stacks([idle, RankStack(1, ())]).verdict == (
        "rank 0 runs nothing: its function has ended; rank 1 did not answer"
    )
    assert str(Stacks([idle])) == Stacks([idle]).verdict
    assert Stacks([idle]).in_past_tense == "rank 0 ran nothing"
    assert str(Stacks()) == "no rank is up yet"


def test_real_rank_that_has_returned_runs_nothing():
    def first_waits() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            dist.barrier()

    with Session(2, output="none") as session:
        run = session.launch(first_waits)
        deadline = time.monotonic() + 20
        # Until rank 0 has got there; a rank that is not up yet is not in it.
        while not re.fullmatch(
            r"rank 0 waits in barrier \(.*\); rank 1 runs nothing: its function has ended",
            verdict := run.stacks().verdict,
        ):
            assert time.monotonic() < deadline, verdict
        run.stop()


def test_ranks_in_the_same_place_share_a_sentence():
    there = text_dump(("/home/u/train.py", 7, "train"))
    assert Stacks.parse({0: there, 1: there, 2: there}).verdict == "ranks 0-2 are in train, /home/u/train.py, line 7"


def test_rank_in_a_library_is_where_the_user_called_it():
    stack = parse_stacks(0, text_dump((LIBRARY, 1, "join"), ("/home/u/train.py", 7, "train")))
    assert here(stack).function == "train"
    assert here(parse_stacks(0, text_dump((LIBRARY, 1, "join")))).function == "join"


def test_text_that_is_no_stack_is_skipped():
    text = "noise\n" + text_dump(("<string>", 1, "f")) + "\n  ...\n\n  Extension modules: numpy (total: 1)\n"
    assert [len(thread.frames) for thread in parse_stacks(0, text).threads] == [1]
    assert parse_stacks(0, text_dump()).here is None
    assert parse_stacks(0, '  File "a", line ??? in b\n').threads == ()


def test_cell_is_named_and_quoted():
    code = (
        "import inspect\nfrom notebook_launcher.kernel.inspection.stacks import *\n"
        "def train():\n    pass\n"
        "file = inspect.getfile(train)\n"
        "dump = f'Thread 0x1 (most recent call first):\\n  File \"{file}\", line 4 in train\\n'\n"
        "str(parse_stacks(0, dump).here)"
    )
    with Kernel() as kernel:
        assert kernel.execute(code).result == "'train, Cell In[1], line 4: pass'"


def test_lines_of_a_cell_with_a_magic_are_those_of_the_notebook():
    lines = ["get_ipython().run_cell_magic('ranks', '', 'x = 1\\nwait(x)\\n')\n"]
    cells.keep_lines({"/cell 7": ("Cell In[7]", lines)})
    found = [StackFrame("<module>", "/cell 7", number).source for number in range(5)]
    linecache.cache.pop("/cell 7")
    assert found == ["", "", "x = 1", "wait(x)", ""]


def test_every_group_call_exists():
    torch_distributed = pytest.importorskip("torch.distributed")
    assert {name for name in stacks.GROUP_CALLS if not hasattr(torch_distributed, name)} == set()


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
