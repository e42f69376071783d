"""A failed launch as a cell shows it: once in full, the culprit first, without frames of this package."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.kernels import Kernel, Outcome

KERNEL_CODE = """
import threading
import torch.distributed as dist
def rank(): return int(os.environ['RANK'])
"""


def plain(outcome: Outcome) -> str:
    """Return the traceback without its colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", outcome.traceback)


def shown(outcome: Outcome) -> str:
    """Return all that a reader of the cell sees, tracebacks included.

    The launch must have no monitor: its picture, which a run of more than a second leaves, has the failure too.
    """
    kept = [{**content, "evalue": ""} for content in outcome.of("stream", "display_data", "update_display_data")]
    return json.dumps(kept) + outcome.traceback


@pytest.mark.parametrize("num_processes", [2, 4])
def test_exception_of_one_rank_is_shown_once_and_names_the_other_ranks(kernel: Kernel, num_processes: int) -> None:
    outcome = kernel.execute(
        "def train():\n"
        "    if rank() == 1: raise ValueError('boom ' + 'of one')\n"
        "    dist.barrier()\n"
        f"notebook_launch(train, {num_processes}, monitor=False)"
    )
    assert outcome.error == "ValueError: boom of one"
    assert shown(outcome).count("boom of one") == 1
    others = "rank 0" if num_processes == 2 else "ranks 0, 2, 3"
    first, *_, last = outcome.traceback.splitlines()
    assert first == f"rank 1 of {num_processes} failed first; {others} failed as a consequence."
    assert last == "ValueError: boom of one"
    assert outcome.stdout.splitlines()[-1].endswith("s on rank 1")
    assert "notebook_launcher/" not in outcome.traceback


def test_exception_of_all_ranks_is_shown_once(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def train(): raise ValueError('boom ' + 'of all')\nnotebook_launch(train, 4, monitor=False)"
    )
    assert shown(outcome).count("boom of all") == 1
    assert " of 4 failed first; ranks " in outcome.traceback
    assert " failed in the same way." in outcome.traceback


def test_each_other_failure_has_one_line(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def train():\n"
        "    dist.barrier()\n"
        "    time.sleep(0.02 * (rank() > 0))\n"
        "    raise (ValueError if rank() == 0 else KeyError)('boom ' + str(rank() > 0))\n"
        "notebook_launch(train, 3)"
    )
    assert outcome.traceback.splitlines()[:2] == ["rank 0 of 3 failed first.", "ranks 1, 2: KeyError: 'boom True'"]
    assert outcome.traceback.count("boom False") == outcome.traceback.count("boom True") == 1


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


def test_syntax_errors_of_later_cells_are_shown_as_usual(kernel: Kernel) -> None:
    caught = "try: notebook_launch(lambda: eval('1 +'), 1)\nexcept SyntaxError: eval('2 +')"
    outcome = kernel.execute(caught)
    assert "2 +" in outcome.traceback.splitlines()[-3]
    assert kernel.execute("get_ipython().custom_exceptions").result == "()"
    assert "interactiveshell" in kernel.execute("eval('3 +')").traceback


def test_exception_handler_of_the_user_is_kept(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "get_ipython().set_custom_exc((SyntaxError,), lambda *_, **__: print('mine'))\n"
        "notebook_launch(eval, 1, args=['1 +'])"
    )
    assert outcome.stdout.endswith("mine\n")
    assert kernel.execute("get_ipython().set_custom_exc((), None)").error is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("lock = threading.Lock()\nnotebook_launch(lambda: lock, 2)", "captures `lock`, a _thread.lock"),
        ("notebook_launch(print, 2, start_metod='fork')", "Did you mean start_method=?"),
        ("notebook_launch(print, -1)", "num_processes=-1 is too small"),
        ("LaunchConfig(num_processes=-1)", "num_processes=-1 is too small"),
        ("with Session(1) as session: pass\nsession.run(print)", "the session is closed"),
    ],
)
def test_refusal_shows_the_line_of_the_cell_and_none_of_ours(kernel: Kernel, code: str, message: str) -> None:
    traceback = plain(kernel.execute(code))
    assert traceback.count(message) == 1
    assert f"----> {len(code.splitlines())} " in traceback
    assert "notebook_launcher/" not in traceback
    assert "Refused" not in traceback


def test_capture_error_shows_the_users_own_code_that_refused(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "class Model:\n"
        "    def __reduce__(self): raise RuntimeError('not this ' + 'one')\n"
        "model = Model()\n"
        "notebook_launch(lambda: model, 2)"
    )
    assert (outcome.error or "").startswith("CaptureError: ")
    assert "in Model.__reduce__" in plain(outcome)
    assert "notebook_launcher/" not in plain(outcome)


def test_value_that_cannot_travel_is_named_once_and_fails_nothing(kernel: Kernel) -> None:
    outcome = kernel.execute("kept = notebook_launch(lambda: threading.Lock(), 2)")
    assert outcome.error is None
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


def test_interrupt_is_one_line(kernel: Kernel) -> None:
    cell = kernel.start("def train(): print('ready', flush=True); time.sleep(60)\nnotebook_launch(train, 2)")
    kernel.wait(cell, until=lambda outcome: "ready" in outcome.stdout)
    kernel.interrupt()
    outcome = kernel.wait(cell)
    assert outcome.error == outcome.traceback == "KeyboardInterrupt: train was stopped"


def test_interrupted_wait_reports_that_the_run_is_still_running(kernel: Kernel) -> None:
    code = (
        "import os, signal, sys\n"
        "def press():\n"
        "    files = []\n"
        "    while files[:2] != ['latch.py', 'handle.py']:\n"
        "        frame, files = sys._current_frames()[threading.main_thread().ident], []\n"
        "        while frame: files.append(os.path.basename(frame.f_code.co_filename)); frame = frame.f_back\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "presser = threading.Thread(target=press)\n"
        "run = launch(lambda: time.sleep(60), 2)\n"
    )
    assert kernel.execute(code).error is None
    outcome = kernel.execute("presser.start(); run.wait()")
    assert outcome.traceback == "KeyboardInterrupt: the wait was interrupted; <lambda> is still running"
    assert kernel.execute("run.stop(); del run, presser").error is None


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


def test_fault_of_the_launcher_itself_shows_everything(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "from notebook_launcher.kernel.run.conclusion import fault_of_ours\n"
        "from notebook_launcher.kernel.plan import make_plan\n"
        "plan = make_plan(LaunchConfig(num_processes=1))\n"
        "try: make_plan(None)\n"
        "except Exception as fault: outcome = fault_of_ours(fault, plan, seconds=1)\n"
        "raise outcome.error"
    )
    assert (outcome.error or "").startswith("InternalError: the run's thread failed")
    assert "notebook_launcher/kernel/plan.py" in outcome.traceback
