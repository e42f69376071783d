"""Runs whose disk is full or read-only: real disks, in a mount namespace of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


def said_on_a_small_disk(program: str, size: str, folder: Path) -> tuple[Path, str]:
    """Run a program whose runs are on a disk of their own; return its folder of runs, and what it printed."""
    home = folder / "runs"
    home.mkdir()
    shell = f'mount -t tmpfs -o size={size} none "{home}" && exec "$@"'
    (folder / "program.py").write_text(program)
    command = ["unshare", "--mount", "bash", "-c", shell, "bash", sys.executable, str(folder / "program.py")]
    environ = {**os.environ, "NOTEBOOK_LAUNCHER_RUNS": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return home, done.stdout


FILLED = """
import os, pathlib, shutil, subprocess, sys, time
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

again = "from notebook_launcher import open_run; print(open_run('last').state)"
for detached in (True, False):
    run = launch(fill, 1, args=(not detached,), output="none", detached=detached)
    print(type(run.exception()).__name__, "batch 2 is empty" in str(run.exception()), flush=True)
    subprocess.run([sys.executable, "-c", again])
    print(sorted(path.name for path in home.glob("*/reserve")))
    (home / "rest").unlink()
    for folder in home.iterdir():
        shutil.rmtree(folder)
"""


def test_end_of_a_run_is_kept_though_the_disk_is_full(tmp_path: Path) -> None:
    _, said = said_on_a_small_disk(FILLED, "1m", tmp_path)
    assert said == "NoneType False\ndone\n[]\nValueError True\nfailed\n[]\n"


BARRED = """
import os, pathlib, subprocess
from notebook_launcher import ConfigError, export, launch, report, runs

def work():
    report(step=1, loss=0.5)
    return 7

home = pathlib.Path(os.environ["NOTEBOOK_LAUNCHER_RUNS"])
full = f"mount -o remount,rw {home} && dd if=/dev/zero of={home}/rest bs=4k count=9 status=none"
for change in (f"mount -o remount,ro {home}", full):
    subprocess.run(change, shell=True, check=True)
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
    print([run.state for run in runs()], len(folders), (home / "work.py").exists())
"""


def test_launch_without_room_for_its_folder_leaves_none(tmp_path: Path) -> None:
    home, said = said_on_a_small_disk(BARRED, "64k", tmp_path)
    expected = (
        f"7\nResourceError: the folder of a detached run or session cannot be made in {home}: {{}}. attach() finds "
        "the run by this folder, so make room there, or name a folder on another disk: runs_folder='a/folder'.\n{}\n"
    )
    assert said == (
        expected.format("Read-only file system", "[] 0 False")
        + expected.format("No space left on device", "['done'] 1 True")
    )
