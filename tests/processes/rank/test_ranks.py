"""Code that a rank survives, and the ends of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator, notebook_launch
from notebook_launcher.processes.rank.user_function import LocalModules
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

KERNEL_CODE = """
import dataclasses, tempfile
from pathlib import Path

def failure_of(function):
    try:
        notebook_launch(function, 2, output="none")
    except BaseException as error:
        known = getattr(error, "failures", ())  # A frozen exception takes no attributes.
        return type(error).__name__, [failure.traceback + failure.summary for failure in known]
"""


def run(kernel: Kernel, code: str) -> str:
    outcome = kernel.execute(code)
    assert outcome.error is None, outcome.traceback
    return outcome.stdout


BATTERED = {
    "frozen": (
        """
        @dataclasses.dataclass(frozen=True)
        class Frozen(Exception):
            code: int
        raise Frozen(7)
        """,
        "Frozen",
    ),
    "deep": (
        """
        error = None
        for i in range(3000):
            later = ValueError(i)
            later.__cause__, error = error, later
        raise error
        """,
        "ValueError: 2999",
    ),
    "members": (
        """
        class OddGroup(Exception):
            exceptions = property(lambda self: 1 / 0)
        raise OddGroup("boom")
        """,
        "OddGroup: boom",
    ),
    "huge": ("raise ValueError('x' * 30_000_000)", "characters left out"),
    "surrogate": ("raise ValueError('\\\\udcff')", "ValueError"),
    "stderr": ("sys.stderr.close()\n        sys.exit('gone')", "sys.exit(\\'gone\\')"),
}


@pytest.mark.parametrize("name", BATTERED)
def test_any_exception_is_reported(kernel: Kernel, name: str) -> None:
    body, expected = BATTERED[name]
    code = f"""
def battered():
    import dataclasses
    if os.environ["RANK"] == "0":
        {body.strip()}
print(failure_of(battered))
"""
    assert expected in run(kernel, code)


SURVIVED = {
    "a fork keeps its call until another comes": (
        """
def once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("boom")
    return "again"
with Session(2, start_method="fork", max_restarts=1) as forked:
    print(list(forked.run(once)))
""",
        "['again', 'again']",
    ),
    "closed standard descriptors": (
        """
def close():
    print("half a line", end="")
    os.close(1), os.close(2)
    return [1, 2, 3]
print(list(notebook_launch(close, 2, output="none")))
""",
        "[[1, 2, 3], [1, 2, 3]]",
    ),
    "an ignored interrupt is for one call": (
        """
def ignore():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
def listens():
    return callable(signal.getsignal(signal.SIGINT))
with Session(2) as deaf:
    deaf.run(ignore)
    print(all(deaf.run(listens)))
""",
        "True",
    ),
    "exit handlers of the standard library": (
        """
import tempfile
mine = tempfile.TemporaryDirectory()
log = Path(mine.name, "log")
def leave_things():
    import logging.handlers, tempfile, builtins
    logger = logging.getLogger("kept")
    memory = logging.handlers.MemoryHandler(100, target=logging.FileHandler(log))
    logger.addHandler(memory)
    logger.warning("kept")
    builtins.kept_folder = tempfile.TemporaryDirectory()
    return builtins.kept_folder.name
folders = list(notebook_launch(leave_things, 1, output="none"))
print([Path(mine.name).exists()], [Path(f).exists() for f in folders], log.read_text().split())
mine.cleanup()
""",
        "[True] [False] ['kept']",
    ),
    "a loader without a length, and steps in tensors": (
        """
def loop():
    import torch, warnings
    from torch.utils.data import DataLoader, IterableDataset
    warnings.simplefilter("error")
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(range(3))
    items = list(track(DataLoader(Endless(), batch_size=None)))
    report(step=torch.tensor(3), loss=torch.ones(1, requires_grad=True))
    try:
        report(step=1.5)
    except TypeError as error:
        assert "a step must be an integer" in str(error)
        return len(items), 3
print(list(notebook_launch(loop, 2, output="none")))
""",
        "[(3, 3), (3, 3)]",
    ),
    "orphans are reaped while the run lasts": (
        """
def orphan():
    import subprocess, psutil
    pid = int(subprocess.check_output("sleep 0.1 >&- & echo $!", shell=True))
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)
print(list(notebook_launch(orphan, 1, output="none")))
""",
        "[True]",
    ),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_rank_survives(kernel: Kernel, name: str) -> None:
    code, expected = SURVIVED[name]
    assert expected in run(kernel, code)


UNWATCHED = """
import os, subprocess
from notebook_launcher.messaging.channel import channel_pair
from notebook_launcher.processes.supervisor import Supervisor
supervisor = Supervisor(channel_pair()[0])
process = subprocess.Popen(["sleep", "600"], start_new_session=True)
supervisor._pids[0] = process.pid  # As it is where no descriptor was left for `os.pidfd_open`.
supervisor.kill_ranks()
assert not os.path.exists(f"/proc/{process.pid}")
process.returncode = 0
"""


def test_rank_that_could_not_be_watched_is_still_killed() -> None:
    # In a process of its own: all children are killed.
    subprocess.run([sys.executable, "-c", UNWATCHED], check=True, cwd=ROOT)


class SlowToArrive:
    """A value that takes some time to be unpickled."""

    def __reduce__(self) -> tuple[type[SlowToArrive], tuple[()]]:
        return _arrive_slowly, ()  # type: ignore[return-value]


def _arrive_slowly() -> SlowToArrive:
    time.sleep(1.5)
    return SlowToArrive()


def test_start_of_the_ranks_does_not_count_as_idle() -> None:
    value = SlowToArrive()
    results = notebook_launch(lambda: type(value).__name__, 1, idle_timeout=1.0, output="none")
    assert list(results) == ["SlowToArrive"]


def test_folder_whose_name_begins_like_the_environments_is_the_users() -> None:
    module = ModuleType("mine")
    for folder, local in ((Path(f"{sys.prefix}-projects"), True), (Path(sysconfig.get_path("purelib")), False)):
        module.__file__ = str(folder / "mine.py")
        assert (LocalModules(str(folder))._local_file(module) is not None) is local


def show_a_moving_table() -> None:
    live = pytest.importorskip("rich.live")
    with live.Live(auto_refresh=False) as display:
        for step in range(5):
            display.update(f"first line\nstep {chr(97 + step)}", refresh=True)


def test_moving_displays_of_rich_are_written_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # As in JupyterLab's kernels.
    notebook_launch(show_a_moving_table, 2, devices="cpu", monitor=False, output="rank0")
    printed = "".join(capfd.readouterr())
    assert printed.count("first line") == printed.count("step ") == 1
    assert "step e" in printed
    assert "\x1b[1A" not in printed


def make_accelerator() -> None:
    Accelerator(cpu=True)


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (os.getpid, {"mixed_precision": "no", "gradient_accumulation_steps": 1, "shard": 1}, None),
        (os.getpid, {"shard": 2}, "shard=2 had no effect: the function made no Accelerator()"),
        (
            os.getpid,
            {"mixed_precision": "bf16", "max_grad_norm": 1.0},
            "mixed_precision='bf16', max_grad_norm=1.0 had no effect: the function made no Accelerator()",
        ),
        (make_accelerator, {"shard": 2, "gradient_accumulation_steps": 2}, None),
    ],
)
def test_settings_that_no_accelerator_reads_are_named(
    function: Any, options: dict[str, Any], words: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    notebook_launch(function, 2, devices="cpu", monitor=False, **options)
    printed = "".join(capfd.readouterr())
    assert (words or "") in printed
    assert printed.count("had no effect") == (words is not None)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VARIABLE = "THP_MEM_ALLOC_ENABLE"


def megabytes_in_huge_pages() -> tuple[int, str]:
    def count() -> int:
        found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
        assert found
        return int(found[1]) // 1024

    before = count()
    tensor = torch.ones(16 * 2**20)  # 64 MB
    return count() - before + 0 * len(tensor), os.environ[VARIABLE]


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason="this system gives huge pages to every program or to none",
)
def test_large_tensors_of_ranks_lie_in_huge_pages_unless_the_user_switches_them_off() -> None:
    for pages, variable in notebook_launch(megabytes_in_huge_pages, 2, devices="cpu"):
        assert pages >= 56
        assert variable == "1"
    assert [*notebook_launch(megabytes_in_huge_pages, 2, devices="cpu", env={VARIABLE: "0"})] == [(0, "0")] * 2
