"""What programs that run cells get: bounded text, reports, and the output of runs that go on after their cell."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.kernel.display.questions import READER
from notebook_launcher.wording import MAX_ERROR, MAX_SHOWN, bounded
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel, Outcome

NEWS = "from notebook_launcher.kernel.display import cell; cell.note_for_agent('')"  # as in a new kernel
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
TRAIN = """
def train(steps=3, then=None):
    for step in range(steps): report(step=step, loss=float('nan') if step == 2 else 1 / (step + 1))
    print('trained')
    if then: then()
def boom(): raise ValueError('batch 2 is empty')
"""
MANY = (
    "run = launch(lambda: report(**{f'loss{i}' * 9: i for i in range(40)}), 2, output='none')\nresults = run.result()\n"
)
VALUES = {
    "notebook_launch(lambda: {f'key {i}' * 9: i for i in range(99)}, 12, backend=None, output='none')": "Results of 12",
    f"{MANY}run.metrics": "points",
    "run.report()": "next:",
    "runs()": "runs in",
    "LaunchConfig(env={f'NAME_{i}': 'x' * 99 for i in range(99)})": "LaunchConfig(",
    "def fail(): raise ValueError('x' * 3000)\ntry: notebook_launch(fail, 2, output='none')\n"
    "except ValueError as error: failures = error.failures\nfailures": "(Failure(",
}


@contextlib.contextmanager
def reader(kernel: Kernel, name: str) -> Iterator[None]:
    """Name the reader of the kernel's cells inside this block."""
    before = evaluate(kernel, f"before, os.environ[{READER!r}] = os.environ[{READER!r}], {name!r}; before")
    yield
    run_cell(kernel, f"os.environ[{READER!r}] = {before!r}")


@pytest.fixture(scope="module")
def kernel(module_kernel: Kernel) -> Kernel:
    run_cell(module_kernel, TRAIN)
    return module_kernel


def test_bounded_keeps_beginning_and_end_and_names_the_rest() -> None:
    text = "\n".join(f"line {number}" for number in range(2000))
    short = bounded(text, "all() has all")
    assert len(short) <= MAX_SHOWN
    assert short.startswith("line 0\nline 1\n")
    assert short.endswith("\nline 1998\nline 1999")
    left_out = re.search(r"\n\.\.\. ([\d,]+) characters left out here: all\(\) has all \.\.\.\n", short)
    assert left_out
    assert len(text) - int(left_out[1].replace(",", "")) == len(short) - len(left_out[0])
    assert bounded("x" * 5000, "all").count("x") > 1800
    assert bounded(text[:MAX_SHOWN], "all") == text[:MAX_SHOWN]


def test_value_shows_at_most_2000_characters(kernel: Kernel) -> None:
    for code, words in VALUES.items():
        shown = run_cell(kernel, code).result or ""
        assert words in shown
        assert len(shown) <= MAX_SHOWN


def test_error_shows_at_most_3000_characters_and_says_where_the_rest_is(kernel: Kernel) -> None:
    deep = "def at(n): return on(n - 1) if n else 1 / 0\ndef on(n): return at(n)\nnotebook_launch(lambda: at(90), 2)"
    for code, words in {deep: "left out here", "notebook_launch(train, 2, timeout='x' * 9000)": "timeout="}.items():
        shown = COLOUR.sub("", kernel.execute(code).traceback)
        assert len(shown) <= MAX_ERROR
        assert words in shown
        assert shown.rstrip().endswith(("x", "ZeroDivisionError: division by zero", ".", "s"))


REPORTS: dict[str, dict[str, Any]] = {
    "run = launch(train, 2, output='none'); run.wait()": {
        "state": "done",
        "first_error": None,
        "metrics": {"loss": {"step": 2, "last": "NaN", "lowest": 0.5, "not_finite": 2, "first_not_finite": 2}},
    },
    "run = launch(train, 2, args=(1, boom), output='none'); run.wait()": {
        "state": "failed",
        "error": "ValueError: batch 2 is empty",
        "first_error": {"function": "boom", "code": "def boom(): raise ValueError('batch 2 is empty')", "line": 5},
    },
    "run = launch(train, 2, args=(1, lambda: time.sleep(60)), output='none')\n"
    "while len(run.metrics) < 2: time.sleep(0.01)": {
        "state": "running",
        "is_over": False,
        "metrics": {"loss": {"last": 1.0, "step": 0}},
    },
    "run.stop()": {"state": "stopped", "first_error": None},
    "run = launch(lambda: os.kill(os.getpid(), 9), 1, output='none'); run.wait()": {
        "state": "failed",
        "first_error": {"rank": 0, "line": None},
    },
}


def contains(told: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(told, dict) and all(contains(told.get(name), value) for name, value in wanted.items())
    return bool(told == wanted)


def test_report_tells_of_runs_in_every_state(kernel: Kernel) -> None:
    for code, wanted in REPORTS.items():
        told = json.loads(run_cell(kernel, f"{code}\nprint(run.report().to_json())").stdout.splitlines()[-1])
        assert contains(told, wanted), f"{code}: {told}"
        assert told["next"]
        shown = run_cell(kernel, "print(run.report())").stdout
        assert len(shown) <= MAX_SHOWN
        assert all(command in shown for command in told["next"])


def test_report_names_who_waits_where(kernel: Kernel) -> None:
    code = (
        "def uneven():\n"
        "    import torch.distributed as dist\n"
        "    if os.environ['RANK'] == '0': time.sleep(60)\n"
        "    dist.barrier()\n"
        "run = launch(uneven, 2, output='none', hang_notice=0.3)\n"
        "while run.state != 'waiting': time.sleep(0.05)\n"
        "print(run.report())\nrun.stop()"
    )
    shown = run_cell(kernel, code).stdout
    assert re.search(r"waiting: rank 1 has waited .* in barrier \(Cell In\[\d+\], line 4\); rank 0 is ", shown)
    assert "run.stacks()" in shown


def test_later_cell_shows_what_ranks_write_after_the_cell_of_their_launch(kernel: Kernel) -> None:
    with reader(kernel, "agent"):
        first = run_cell(
            kernel,
            "open('wait', 'w').close()\n"
            "def late():\n"
            "    print('early', flush=True)\n"
            "    while os.path.exists('wait'): time.sleep(0.01)\n"
            "    print('late'); report(loss=1.0); time.sleep(1.2)\n"
            "run = launch(late, 2)\n"
            "while 'early' not in run.logs(0): time.sleep(0.01)",
        )
        run_cell(kernel, "os.remove('wait')\nwhile 'late' not in run.logs(1): time.sleep(0.01)")
        later: Outcome = run_cell(kernel, "print('before')\nrun.result()")
        assert later.stdout.startswith("before\n")  # what the cell itself has printed
        assert "[ranks 0,1] late\n" in later.stdout
        assert (first.stdout + later.stdout).count("early") == 1
        assert any("late on 2 ranks: done" in display["data"].get("text/plain", "") for display in later.displays)


def test_first_launch_tells_an_agent_how_to_return_at_once_and_so_does_an_interrupt(kernel: Kernel) -> None:
    hint = "run = launch(nap, 1, ..., detached=True); then run.wait(20); run.report()"
    run_cell(kernel, NEWS)
    with reader(kernel, "agent"):
        first, *_ = run_cell(
            kernel, "def nap(seconds=0): time.sleep(seconds)\nnotebook_launch(nap, 1)"
        ).stdout.splitlines()
        assert first.startswith("No person waits for this cell, and an interrupt stops its run.")
        assert first.endswith(hint)
        assert hint not in run_cell(kernel, "notebook_launch(nap, 1)").stdout
        cell = kernel.start("notebook_launch(nap, 1, args=(60,))")
        kernel.wait(cell, until=lambda outcome: "1 CPU rank" in outcome.stdout)
        kernel.interrupt()
        assert hint in kernel.wait(cell).traceback
        told = run_cell(kernel, "notebook_launch(nap, 1)").stdout
        assert re.match(r"nap was stopped by an interrupt after .*\. No person waits", told)
    run_cell(kernel, NEWS)
    assert hint not in kernel.wait(kernel.start("notebook_launch(nap, 1)", allow_stdin=True)).stdout


def test_client_in_python_of_a_server_is_a_program(kernel: Kernel) -> None:
    code = (
        "from notebook_launcher.kernel.display.questions import reader_of\n"
        "app, message = get_ipython().kernel.parent, get_ipython().kernel.get_parent('shell')\n"
        f"before, file = os.environ.pop({READER!r}), app.connection_file\n"
        "readers = [reader_of(message)]\n"
        "app.connection_file = 'kernel-12345678-1234-1234-1234-123456789abc.json'\n"
        "page = {**message, 'header': {'msg_id': '12345678-1234-4234-9234-123456789abc'}}\n"
        "readers += [reader_of(message), reader_of(page)]\n"
        f"os.environ[{READER!r}], app.connection_file = before, file\n"
        "readers"
    )
    outcome = kernel.wait(kernel.start(code, allow_stdin=True))
    assert outcome.result == "['person', 'agent', 'person']", outcome
