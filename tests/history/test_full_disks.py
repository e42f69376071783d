"""The end of runs whose disk is full by then: real disks of one megabyte, in a mount namespace of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, pathlib, subprocess, sys, time
from notebook_launcher import launch, report

home = pathlib.Path(os.environ["NOTEBOOK_LAUNCHER_RUNS"])

def fill(fails):
    while not list(home.glob("*/reserve")):
        time.sleep(0.01)
    with open(home / "rest", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    for step in range(1000):
        report(step=step, loss=0.5)
        print("x" * 1000)
    if fails:
        raise ValueError("batch 2 is empty")
    return 7

run = launch(fill, 1, args=(sys.argv[2] == "fails",), output="none", detached=sys.argv[1] == "detached")
print(repr(run.exception()))
again = "from notebook_launcher import open_run; print(open_run('last').state)"
print(subprocess.run([sys.executable, "-c", again], stdout=subprocess.PIPE, text=True).stdout, end="")
print(sorted(path.name for path in home.glob("*/reserve")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(
    ("kind", "end", "said"),
    [
        ("detached", "returns", "None\ndone\n"),
        ("plain", "fails", r"\w+\(.*batch 2 is empty.*\)\nfailed\n"),
    ],
)
def test_end_of_a_run_is_kept_though_the_disk_is_full(kind: str, end: str, said: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    home = tmp_path / "runs"
    home.mkdir()
    shell = f'mount -t tmpfs -o size=1m none "{home}" && exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", shell, "bash", sys.executable, str(program), kind, end]
    environ = {**os.environ, "NOTEBOOK_LAUNCHER_RUNS": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert re.fullmatch(rf"{said}\[\]\n", done.stdout), done.stdout + done.stderr


BARRED = """
import os, pathlib
from notebook_launcher import ConfigError, export, launch, report, runs

def work():
    report(step=1, loss=0.5)
    return 7

home = pathlib.Path(os.environ["NOTEBOOK_LAUNCHER_RUNS"])
plain = launch(work, 1, output="none")
print(plain.result(100)[0])
try:
    launch(work, 1, output="none", detached=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
try:
    export(work, home / "work.py", 1)
except ConfigError as error:
    assert "work.py'): it cannot be written" in str(error)
folders = [path for path in home.iterdir() if path.is_dir()]
print([run.state for run in runs()], len(folders))
print([path.name for path in home.iterdir() if path.suffix == ".py"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(
    ("change", "reason", "left"),
    [
        ("mount -o remount,ro {home}", "Read-only file system", "[] 0\n[]"),
        (
            "dd if=/dev/zero of={home}/rest bs=4k count=9 status=none",
            "No space left on device",
            "['done'] 1\n['work.py']",
        ),
    ],
    ids=["read-only", "too full for the end of a run"],
)
def test_launch_without_room_for_its_folder_leaves_none(change: str, reason: str, left: str, tmp_path: Path) -> None:
    program, home = tmp_path / "program.py", tmp_path / "runs"
    program.write_text(BARRED)
    home.mkdir()
    shell = f'mount -t tmpfs -o size=64k none "{home}" && {{ {change.format(home=home)} 2>&-; }} && exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", shell, "bash", sys.executable, str(program)]
    environ = {**os.environ, "NOTEBOOK_LAUNCHER_RUNS": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    expected = (
        f"7\nResourceError: the folder of a detached run or session cannot be made in {home}: {reason}. attach() finds "
        "the run by this folder, so make room there, or name a folder on another disk: runs_folder='a/folder'.\n"
        f"{left}\n"
    )
    assert done.stdout == expected, done.stderr
