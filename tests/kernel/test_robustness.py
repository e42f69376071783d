"""Rough treatment that once hung a run, lost an error or hurt the kernel."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kernels import Kernel

KERNEL_CODE = "def rank(): return int(os.environ['RANK'])"


def test_reader_that_has_gone_does_not_fail_the_run() -> None:
    program = (
        "import os, sys\n"
        "from notebook_launcher import notebook_launch\n"
        "os.close(1); os.dup(os.open('/dev/null', os.O_RDONLY))\n"
        "sys.stderr.write(repr(list(notebook_launch(lambda: print('x' * 10) or 1, 2))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.startswith("[1, 1]"), done.stderr


def test_exits_of_many_ranks_are_handled_while_the_kernel_is_busy(kernel: Kernel) -> None:
    code = (
        "def leave(): report(x=1); os._exit(3)\n"
        "run = launch(leave, 8, output='none')\n"
        "while not run.wait(0): sum(range(10_000))\n"
        "print(type(run.exception()).__name__)"
    )
    for _ in range(3):
        assert kernel.execute(code).stdout == "RankFailedError\n"


def test_session_whose_ranks_cannot_start_raises_a_resource_error(kernel: Kernel) -> None:
    outcome = kernel.execute("session = Session(2, start_method='spawn', env={'X': 'a' * 200_000})\nsession.run(rank)")
    assert "rank 0 of 2 could not be started: Argument list too long." in (outcome.error or "")
    again = kernel.execute("session.run(rank)")
    assert "could not be started" in (again.error or "")
    assert kernel.execute("session.close()").error is None


class Asked(Exception):  # noqa: N818
    """The prompt has come."""


def test_failed_run_does_not_wait_for_an_answer(kernel: Kernel) -> None:
    def never_answer(_prompt: str, _password: bool) -> str:  # how the harness calls it
        raise Asked

    cell = kernel.start(
        "def ask():\n"
        "    if rank(): time.sleep(0.5); raise ValueError('boom')\n"
        "    return input('name? ')\n"
        "notebook_launch(ask, 2)",
        allow_stdin=True,
    )
    with pytest.raises(Asked):
        kernel.wait(cell, answer_input=never_answer)
    assert kernel.wait(cell).error == "ValueError: boom"


def test_stop_while_the_fork_server_is_starting_ends_the_run(tmp_path: Path) -> None:
    slow = "import sys, time\nif 'forkserver' in sys.orig_argv[-1]: time.sleep(30)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    program = (
        f"import os, time; os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        "from notebook_launcher import *\n"
        "run = launch(print, 2); began = time.monotonic()\n"
        "print(run.stop(), run.state, time.monotonic() - began < 3)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("kill stopped True\n"), done


def test_forgotten_session_ends_its_ranks(kernel: Kernel) -> None:
    outcome = kernel.execute("s = Session(2); s.run(rank)\ndel s\nimport gc; gc.collect()")
    assert outcome.error is None


def test_process_in_a_session_of_its_own_does_not_keep_a_dead_ranks_run(kernel: Kernel) -> None:
    began = time.monotonic()
    outcome = kernel.execute(
        "def leaves_a_child():\n"
        "    if rank() == 1:\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        "            time.sleep(30)\n"
        "        os._exit(3)\n"
        "    time.sleep(30)\n"
        "notebook_launch(leaves_a_child, 2)"
    )
    assert (outcome.error or "").startswith("RankFailedError: rank 1 of 2 exited with code 3")
    assert time.monotonic() - began < 5


def test_call_that_cannot_be_rebuilt_in_a_rank_is_an_arrival_failure(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "class Config(Exception):\n"
        "    def __init__(self, lr): super().__init__()\n"
        "    def __reduce__(self): return Config, ()\n"
        "config = Config(0.1)\n"
        "def train(): return config\n"
        "notebook_launch(train, 2)"
    )
    assert (outcome.error or "").startswith("TypeError: Config.__init__() missing 1 required positional argument")
    assert "because the function or an object that it uses could not be rebuilt in the rank." in outcome.traceback
