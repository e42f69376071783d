"""Bad input and a machine that has no room: a clear error, nothing started, nothing left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import run_cell, unchanged

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

KERNEL_CODE = """
import functools, threading
def train(lr): return lr
async def values(): yield 1
lock = threading.Lock()
def locking(): return lock
"""


@pytest.fixture(scope="module")
def kernel(module_kernel: Kernel) -> Kernel:
    return module_kernel


def run_python(code: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program that launches, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
        env=env,
    )


def test_launch_without_free_descriptors_threads_or_a_temporary_folder() -> None:
    done = run_python(
        "import os, psutil, resource, tempfile, threading\n"
        "from notebook_launcher import *\n"
        "tempfile.tempdir = '/proc/nowhere'\n"
        "run = launch(lambda: print('x' * 9_000_000), 2, output='none')\n"
        "print(len(run.result()), len(run.logs(0)))\n"
        "def session(process):\n"
        "    try: return os.getsid(process.pid)\n"
        "    except ProcessLookupError: return None\n"
        "def look():\n"  # A fork server's deputy, which comes and goes, is in its session.
        "    sessions = {session(process) for process in psutil.Process().children(recursive=True)} - {None}\n"
        "    return len(sessions), len(os.listdir('/proc/self/fd'))\n"
        "def refused(call, num):\n"
        "    before = look()\n"
        "    try: call(os.getpid, num)\n"
        "    except ResourceError as error: print(look() == before, error)\n"
        "threading.stack_size(1 << 46)\n"  # More than there are addresses.
        "for call in (notebook_launch, launch, lambda fn, num: Session(num).run(fn)): refused(call, 2)\n"
        "threading.stack_size(0)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "refused(notebook_launch, 16)\n"
        "print(len(notebook_launch(os.getpid, 2, output='none')))\n",
        env={"TMPDIR": "/proc/nowhere", "PATH": "/usr/bin:/bin"},
    )
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("2 9000001", "2"), done
    *threads, descriptors = [line for line in lines if line.startswith(("True ", "False "))]
    assert len(threads) == 3, done
    for told in threads:
        assert re.match(r"True .*the run's thread could not be started: can't start new thread\. The", told), told
    assert re.match(r"True .*cannot start 16 ranks: Too many open files", descriptors), descriptors
    assert "`ulimit -n` shows the limit: use fewer ranks, or raise it" in descriptors


def test_launch_without_free_processes_gives_a_clear_error() -> None:
    # Root may start as many as it likes, so the program becomes somebody else first.
    done = run_python(
        "import os, resource, torch\n"
        "from notebook_launcher import *\n"
        "def launch_here(num): return notebook_launch(os.getpid, num, output='none', start_method='fork')\n"
        "launch_here(1)\n"
        "import torch.distributed.nn.functional\n"  # torch 2.6 makes a folder then, and somebody else may not.
        "if os.getuid() == 0: os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "mine = sum(len(os.listdir(f'/proc/{p}/task')) for p in os.listdir('/proc') if p.isdigit()\n"
        "           and os.stat(f'/proc/{p}').st_uid == os.getuid())\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (mine + 14, mine + 14))\n"
        "try: launch_here(16)\n"
        "except ResourceError as error: print(error)\n"
        "print(len(launch_here(1)))\n"
    )
    assert "could not be started: " in done.stdout, done.stdout + done.stderr
    assert "`ulimit -u`" in done.stdout
    assert done.stdout.endswith("\n1\n")


def test_failing_import_of_torch_is_reported(tmp_path: Path) -> None:
    Path(tmp_path, "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    done = run_python(
        "from notebook_launcher import *\n"
        "try: notebook_launch(print, 2, output='none')\n"
        "except InternalError as error: print(error)\n",
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert "libcudart.so.13 is missing" in done.stdout, done.stdout + done.stderr


CALLED_WRONGLY = {
    "notebook_launch(train, 0, args=(1,))": "ConfigError: num_processes=0 is too small",
    "notebook_launch(train, 1000, args=(1,))": "ConfigError: num_processes=1000 is too many for this machine",
    "notebook_launch(values, 2)": "ConfigError: values is an async generator function (async def with a yield)",
    "notebook_launch(train, 2, arg=(1,))": "ConfigError: unknown option arg=. Did you mean args=?",
    "Session(2).run(train, 1)": "ConfigError: Arguments of the function go by name. Write session.run(train, args=(1",
    "notebook_launch(train, (1,))": "ConfigError: num_processes=(1,) is a tuple",
    "notebook_launch(locking, 2)": "CaptureError: the function locking captures `lock`, a _thread.lock, which cannot",
    "notebook_launch(train, 2, args=(lock,))": "CaptureError: ",
    "Session(2, sed=1)": "ConfigError: unknown option sed=. Did you mean seed=?",
    "notebook_launch(print, 2, start_metod='fork')": "ConfigError: unknown option start_metod=. Did you mean start_me",
    "LaunchConfig(num_processes=-1)": "ConfigError: num_processes=-1 is too small",
    "run.set(nope=1)": "ValueError: nope=1: this run offers",
    "run.sample('x')": "ValueError: sample(seconds='x', rate=20.0): seconds must be a number",
    "run.profile(0)": "ValueError: profile(updates=0)",
    "open_run('nope')": "LookupError: there is no run 'nope'",
    "attach(3)": "ConfigError: run=3 is an int. Pass a run's id",
    "runs(3)": "ConfigError: folder=3 is an int. Pass the path of a folder that holds runs, or 'auto'.",
    "compare(run, 'nope')": "LookupError: there is no run 'nope'",
    "Results({0: 'a', 1: 'b'}, num_processes=2).mean()": "TypeError: result has no mean",
    "Results({0: 1}, num_processes=1)[5]": "IndexError: results[5]: the ranks are 0 to 0",
    "with Session(1) as session: pass\nsession.run(print)": "CallOrderError: the session is closed",
}
"""By cell: the beginning of its error. `tests/kernel/calls/test_checks.py` has more."""


def test_wrong_call_leaves_nothing_and_shows_the_line_of_the_caller_alone(kernel: Kernel) -> None:
    run_cell(
        kernel,
        "from notebook_launcher import attach, compare, launch, open_run\n"
        "from notebook_launcher.kernel.results import Results\n"
        "import time; run = launch(time.sleep, 1, args=(600,), output='none', monitor=False, runs_folder=None)\n"
        "while run.state != 'running': time.sleep(0.01)",
    )
    with unchanged(kernel):
        for call, error in CALLED_WRONGLY.items():
            outcome = kernel.execute(call)
            assert (outcome.error or "").startswith(error), outcome.error
            assert "CPU rank" not in outcome.stdout
            shown = re.sub(r"\x1b\[[\d;]*m", "", outcome.traceback)
            assert "notebook_launcher/" not in shown
            assert f"----> {len(call.splitlines())} " in shown
            assert shown.count((outcome.error or "").partition(": ")[2]) == 1
    kernel.execute("run.stop()")
