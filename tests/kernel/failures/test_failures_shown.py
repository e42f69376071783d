"""A failed launch as a cell shows it: once in full, the culprit first, without frames of this package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import run_cell

if TYPE_CHECKING:
    from tests.support.kernels import Kernel, Outcome

KERNEL_CODE = """
import threading
import torch.distributed as dist
def rank(): return int(os.environ['RANK'])
"""


def shown(outcome: Outcome) -> str:
    """Return all that a reader of the cell sees, tracebacks included.

    The launch must have no monitor: its picture, which a run of more than a second leaves, has the failure too.
    """
    kept = [{**content, "evalue": ""} for content in outcome.of("stream", "display_data", "update_display_data")]
    return json.dumps(kept) + outcome.traceback


def test_exception_that_is_false_reaches_the_cell(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "class Problems(Exception):\n    def __len__(self): return 0\n"
        "def train(): raise Problems('none listed')\n"
        "notebook_launch(train, 2, monitor=False)"
    )
    assert outcome.error == "Problems: none listed"


def test_exception_of_one_rank_is_shown_once_and_names_the_other_ranks(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def train():\n"
        "    if rank() == 1: raise ValueError('boom ' + 'of one')\n"
        "    dist.barrier()\n"
        "notebook_launch(train, 4, monitor=False)"
    )
    assert outcome.error == "ValueError: boom of one"
    assert shown(outcome).count("boom of one") == 1
    first, *_, last = outcome.traceback.splitlines()
    assert first == "rank 1 of 4 failed first; ranks 0, 2, 3 failed as a consequence."
    assert last == "ValueError: boom of one"
    assert outcome.stdout.splitlines()[-1].endswith("s on rank 1")
    assert "notebook_launcher/" not in outcome.traceback


@pytest.mark.parametrize(
    "code",
    ["exec('def f(:\\n    pass')", "raise ExceptionGroup('boom in a group', [ValueError('a member')])"],
    ids=["SyntaxError", "ExceptionGroup"],
)
def test_exceptions_that_ipython_draws_itself_are_shown_once_without_our_frames(kernel: Kernel, code: str) -> None:
    if "ExceptionGroup" in code and kernel.execute("ExceptionGroup").error is not None:
        pytest.skip("Python 3.10 has no exception groups")
    outcome = kernel.execute(f"def train():\n    {code}\nnotebook_launch(train, 2)")
    assert outcome.traceback.count("failed first") == 1
    assert outcome.traceback.count("Error: ") + outcome.traceback.count("Group: ") == 1 + code.count("ValueError")
    for place in ("notebook_launcher/", "interactiveshell"):
        assert place not in outcome.traceback + outcome.stderr


def test_value_that_cannot_travel_is_named_once_and_fails_nothing(kernel: Kernel) -> None:
    outcome = run_cell(kernel, "kept = notebook_launch(lambda: threading.Lock(), 2)")
    assert outcome.stderr.count("the return value cannot travel") == 1
    assert "ranks 0, 1: the return value cannot travel: `result` is a _thread.lock" in outcome.stderr
    outcome = kernel.execute("kept[1]")
    assert (outcome.error or "").startswith("ReturnValueError: rank 1: the return value cannot travel")
    assert "pickle" not in outcome.traceback


def test_value_whose_own_code_refuses_to_travel_shows_that_code(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "class Model:\n"
        "    def __reduce__(self): raise RuntimeError('not this ' + 'one')\n"
        "notebook_launch(lambda: Model(), 2)[0]"
    )
    assert (outcome.error or "").startswith("ReturnValueError: ")
    assert "RuntimeError: not this one" in outcome.traceback
    assert "It was raised in __reduce__, Cell In[" in outcome.traceback


def test_interrupted_wait_reports_that_the_run_is_still_running(kernel: Kernel) -> None:
    run_cell(kernel, "run = launch(lambda: time.sleep(60), 2)")
    waits = "sys._current_frames()[threading.main_thread().ident].f_code.co_filename.endswith('latch.py')"
    outcome = kernel.execute(
        "def press():\n"
        f"    while not {waits}: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=press).start(); run.wait()"
    )
    assert outcome.traceback == "KeyboardInterrupt: the wait was interrupted; <lambda> is still running"
    run_cell(kernel, "run.stop(); del run, press")


def test_crash_is_shown_once_and_its_victims_are_stopped(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def train():\n"
        "    if rank() == 1: ctypes.string_at(0)\n"
        "    dist.barrier()\n"
        "try: notebook_launch(train, 4)\n"
        "except RankFailedError as error: failed = error; raise"
    )
    assert outcome.traceback.count("SIGSEGV") == 1
    assert outcome.traceback.splitlines()[0] == "rank 1 of 4 failed first; ranks 0, 2, 3 failed as a consequence."
    assert "gloo" not in outcome.traceback
    states = kernel.execute("print([one.state for one in failed.results.ranks]); del failed").stdout
    assert states == "['stopped', 'failed', 'stopped', 'stopped']\n"
