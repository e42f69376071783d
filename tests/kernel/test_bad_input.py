"""Bad input and a machine that has no room: a clear error, nothing started, nothing left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

KERNEL_CODE = """
import functools, threading
def train(lr): return lr
async def coroutine(): pass
async def values(): yield 1
class Model:
    def __init__(self, width=1): self.width = width
    def fit(self, lr): return lr
    def __call__(self): return "called"
lock = threading.Lock()
def locking(): return lock
"""


@pytest.fixture(scope="module")
def kernel(module_kernel: Kernel) -> Kernel:
    return module_kernel


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("notebook_launch(train, 0, args=(1,))", "ConfigError: num_processes=0 is too small"),
        ("notebook_launch(train, 2.5, args=(1,))", "ConfigError: num_processes=2.5 is a float"),
        ("notebook_launch(train, 'two', args=(1,))", "ConfigError: num_processes='two' is a str"),
        ("notebook_launch(train, 1000, args=(1,))", "ConfigError: num_processes=1000 is too many for this machine"),
        ("notebook_launch(3, 2)", "ConfigError: fn=3 is an int, which cannot be called"),
        ("notebook_launch(train(1), 2)", "ConfigError: fn=1 is an int"),
        ("notebook_launch(coroutine, 2)", "ConfigError: coroutine is a coroutine function"),
        ("notebook_launch(values, 2)", "ConfigError: values is an async generator function (async def with a yield)"),
        ("notebook_launch(train, 2, arg=(1,))", "ConfigError: unknown option arg=. Did you mean args=?"),
        ("notebook_launch(train, 2, kwarg={'lr': 1})", "ConfigError: unknown option kwarg=. Did you mean kwargs=?"),
        ("notebook_launch(train, 2)", "ConfigError: train(lr) cannot be called with args=(), kwargs={}"),
        ("notebook_launch(train, 2, args=1)", "ConfigError: args=1 is an int; it must be a tuple"),
        (
            "notebook_launch(train, (1,), num_processes=2)",
            "ConfigError: Arguments of the function go by name. Write notebook_launch(train, 2, args=(1,)).",
        ),
        (
            "Session(2).run(train, 1)",
            "ConfigError: Arguments of the function go by name. Write session.run(train, args=(1,)).",
        ),
        ("notebook_launch(train, 2, lr=1)", "ConfigError: unknown option lr=. train has a parameter of that name"),
        ("notebook_launch(train, (1,))", "ConfigError: num_processes=(1,) is a tuple"),
        ("notebook_launch(train, 2, args=(1,), mixed='bf16')", "ConfigError: unknown option mixed=."),
        ("notebook_launch(train, 2, args=(1,), backend='ncl')", "ConfigError: backend='ncl' is unknown."),
        ("notebook_launch(train, 2, args=(1,), backend='nccl')", "ConfigError: backend='nccl' needs a GPU for each"),
        ("notebook_launch(train, 2, args=(1,), devices=[7])", "ConfigError: devices=[7]: no GPU found"),
        (
            "notebook_launch(train, 2, args=(1,), mixed_precision='fp4')",
            "ConfigError: mixed_precision='fp4' is unknown",
        ),
        (
            "notebook_launch(locking, 2)",
            (
                "CaptureError: the function locking captures `lock`, a _thread.lock, which cannot travel to another "
                "process. `lock` was set in Cell In["
            ),
        ),
        ("notebook_launch(train, 2, args=(lock,))", "CaptureError: "),
        ("launch(train, 0)", "ConfigError: num_processes=0 is too small"),
        ("Session(0)", "ConfigError: num_processes=0 is too small"),
        ("Session(2, sed=1)", "ConfigError: unknown option sed=. Did you mean seed=?"),
        ("notebook_launch(prewarm, 1)", "CallOrderError: prewarm was called inside rank 0"),
        ("notebook_launch(lambda: launch(train, 1, args=(1,)), 1)", "CallOrderError: launch was called inside rank 0"),
        ("notebook_launch(lambda: Session(1), 1)", "CallOrderError: Session was called inside rank 0"),
    ],
)
def test_bad_input_gives_a_clear_error_and_leaves_nothing(kernel: Kernel, call: str, error: str) -> None:
    with unchanged(kernel):
        outcome = kernel.execute(call)
    assert (outcome.error or "").startswith(error), outcome.error
    started = "inside rank" in error
    assert ("CPU rank" in outcome.stdout) == started


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("lambda: 5", "5"),
        ("functools.partial(train, 3)", "3"),
        ("functools.partial(Model().fit, lr=4)", "4"),
        ("Model()", "called"),
        ("os.getcwd", None),
        ("dict", "{}"),
    ],
)
def test_every_kind_of_callable_works(kernel: Kernel, function: str, expected: str | None) -> None:
    with unchanged(kernel):
        outcome = kernel.execute(f"print(notebook_launch({function}, 2, output='none')[1])")
    assert outcome.error is None, outcome.traceback
    assert expected is None or outcome.stdout == f"{expected}\n"


def test_launching_a_class_returns_its_instances(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "r = notebook_launch(Model, 2, kwargs={'width': 3}); print(type(r[0]) is Model, r[1].width)"
    )
    assert outcome.stdout.endswith("True 3\n")


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


def test_launch_without_free_descriptors_gives_a_clear_error() -> None:
    done = run_python(
        "import os, resource\n"
        "from notebook_launcher import *\n"
        "notebook_launch(os.getpid, 2, output='none')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "before = os.listdir('/proc/self/fd')\n"
        "try: notebook_launch(os.getpid, 16)\n"
        "except ResourceError as error: print(error)\n"
        "print(len(before) == len(os.listdir('/proc/self/fd')))\n"
        "print(len(notebook_launch(os.getpid, 2, output='none')))\n"
    )
    first, second, third = done.stdout.splitlines()
    assert "cannot start 16 ranks: Too many open files" in first
    assert "`ulimit -n` shows the limit: use fewer ranks, or raise it" in first
    assert (second, third) == ("True", "2")


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


def test_launch_without_free_threads_gives_a_clear_error() -> None:
    done = run_python(
        "import os, psutil, threading\n"
        "from notebook_launcher import *\n"
        "def session(process):\n"
        "    try: return os.getsid(process.pid)\n"
        "    except ProcessLookupError: return None\n"
        "def look():\n"  # A fork server's deputy, which comes and goes, is in its session.
        "    sessions = {session(process) for process in psutil.Process().children(recursive=True)} - {None}\n"
        "    return len(sessions), len(os.listdir('/proc/self/fd'))\n"
        "notebook_launch(os.getpid, 2, output='none')\n"
        "before = look()\n"
        "threading.stack_size(1 << 46)\n"  # More than there are addresses.
        "for call in (notebook_launch, launch, Session(2).run):\n"
        "    try: call(os.getpid)\n"
        "    except ResourceError as error: print(error)\n"
        "    print(look() == before)\n"
        "threading.stack_size(0)\n"
        "print(len(notebook_launch(os.getpid, 2, output='none')))\n"
    )
    lines = done.stdout.splitlines()
    told = [line for line in lines if "the run's thread could not be started: can't start new thread. The" in line]
    assert len(told) == 3, done
    assert lines.count("True") == 3, done
    assert lines[-1] == "2"


def test_launch_works_without_a_writable_temporary_folder() -> None:
    done = run_python(
        "import os, tempfile\n"
        "from notebook_launcher import *\n"
        "tempfile.tempdir = '/proc/nowhere'\n"
        "run = launch(lambda: print('x' * 9_000_000), 2, output='none')\n"
        "print(len(run.result()), len(run.logs(0)))\n",
        env={"TMPDIR": "/proc/nowhere", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout == "2 9000001\n", done.stderr


def test_launch_without_free_memory_gives_a_clear_error(kernel: Kernel) -> None:
    with unchanged(kernel):
        # A tensor of zeros that nobody has touched takes no memory; sending it would.
        outcome = kernel.execute(
            "import torch, psutil\n"
            "huge = torch.empty(int(0.99 * psutil.virtual_memory().total), dtype=torch.uint8)\n"
            "def use(): return huge.numel()\n"
            "notebook_launch(use, 2)"
        )
        kernel.execute("del huge")
    assert (outcome.error or "").startswith("ResourceError: "), outcome.error
    assert "GB" in (outcome.error or "")


def test_failing_import_of_torch_is_reported(tmp_path: Path) -> None:
    Path(tmp_path, "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    done = run_python(
        "from notebook_launcher import *\n"
        "try: notebook_launch(print, 2, output='none')\n"
        "except InternalError as error: print(error)\n",
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert "libcudart.so.13 is missing" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def running(kernel: Kernel) -> Iterator[Kernel]:
    """Return the kernel with a run that goes on, `run`; it is stopped after the test."""
    kernel.execute(
        "from notebook_launcher import attach, compare, launch, open_run\n"
        "from notebook_launcher.kernel.results import Results"
    )
    begun = kernel.execute("import time; run = launch(time.sleep, 1, args=(600,), output='none', monitor=False)")
    assert begun.error is None
    try:
        yield kernel
    finally:
        kernel.execute("run.stop()")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("run.set(nope=1)", r"ValueError: nope=1: this run offers"),
        (
            "run.sample(0)",
            r"ValueError: sample\(seconds=0, rate=20.0\): seconds must be a number, more than 0 and up to 60",
        ),
        ("run.sample('x')", r"ValueError: sample\(seconds='x', rate=20.0\): seconds must be a number"),
        ("run.profile(0)", r"ValueError: profile\(updates=0\)"),
        ("open_run('nope')", r"LookupError: there is no run 'nope'"),
        ("open_run(3)", r"ConfigError: run=3 is an int\. Pass a run's id"),
        ("attach(3)", r"ConfigError: run=3 is an int\. Pass a run's id"),
        ("runs(3)", r"ConfigError: folder=3 is an int\. Pass the path of a folder that holds runs, or 'auto'\."),
        ("attach('nope')", r"LookupError: there is no run 'nope'"),
        ("compare(run, 'nope')", r"LookupError: there is no run 'nope'"),
        ("Results({0: 'a', 1: 'b'}, num_processes=2).mean()", r"TypeError: .*no mean"),
        ("Results({0: 1}, num_processes=1)[5]", r"IndexError: results\[5\]: the ranks are 0 to 0"),
    ],
)
def test_wrong_value_shows_the_line_of_the_caller_alone(running: Kernel, call: str, error: str) -> None:
    outcome = running.execute(call)
    assert outcome.error is not None
    assert re.match(error, outcome.error), outcome.error
    shown = re.sub(r"\x1b\[[\d;]*m", "", outcome.traceback)
    assert "notebook_launcher/" not in shown
    assert "Cell In[" in shown
