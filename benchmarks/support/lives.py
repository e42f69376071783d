"""The memory of idle ranks, the time until a death is noticed, and the time of imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.contender import memory_of
from support.measurements import GONE_LIMIT, LABELS, LIMIT, Measurements
from support.process import Contender, FailedError
from support.report import median, megabytes, table

IDLE = ["session", "ours", "torch-fork", "torch-spawn", "accelerate", "nbdistributed"]


def measure_idle(found: Measurements) -> None:
    for name in found.chosen(IDLE):
        with found.guarded("idle", name), Contender(name, 2) as contender:
            contender.ask("prepare", timeout=LIMIT)
            contender.settle()
            stays = name in ("session", "nbdistributed")
            pids = contender.ask("look", timeout=LIMIT)["pids"] if stays else begin_idle(contender, 2)
            contender.settle()
            ranks = [memory_of(pid) for pid in pids]
            rest = [
                _memory_if_alive(pid) for pid in contender.family() if pid not in pids and pid != contender.process.pid
            ]
            found.add(median([sizes["pss"] for sizes in ranks]), "idle", name, "pss")
            found.add(median([sizes["private"] for sizes in ranks]), "idle", name, "private")
            found.add(sum(sizes["pss"] for sizes in [*ranks, *rest]), "idle", name, "all")


def _memory_if_alive(pid: int) -> dict[str, int]:
    try:
        return memory_of(pid)
    except (OSError, KeyError):
        return {"pss": 0, "private": 0}


def begin_idle(contender: Contender, num_ranks: int) -> list[int]:
    """Launch a function that does not end; return the ranks' process numbers once they run it."""
    folder = Path(contender.ask("folder", timeout=LIMIT)["folder"])
    contender.tell("idle")
    deadline = time.monotonic() + LIMIT
    while len(files := list(folder.glob("*.json"))) < num_ranks:
        if time.monotonic() > deadline:
            raise FailedError("the ranks did not start")
        time.sleep(0.02)
    contender.family()
    return [json.loads(file.read_text())["pid"] for file in files]


def idle_table(found: Measurements) -> str:
    rows = [
        [LABELS[name][0], *(found.cell("idle", name, what, form=lambda values: megabytes(values[0])) for what in
         ("pss", "private", "all")), found.reasons.get(("idle", name), "")]
        for name in found.chosen(IDLE)
    ]  # fmt: skip
    return (
        "## Memory of two idle ranks\n\nMB. The whole tree is every process but the caller; ours includes fork server "
        "and supervisor.\n\n" + table(["launcher", "rank, proportional", "rank, private", "whole tree", ""], rows)
    )


OURS = ("import notebook_launcher", "from notebook_launcher import notebook_launch")
KERNEL = "the same after `import IPython, ipykernel`, as in a kernel"
IMPORTS = (OURS[0], OURS[1], KERNEL, "from accelerate import notebook_launcher", "import torchrunx", "import torch")
"""Statements, and one that a kernel runs."""


def measure_imports(found: Measurements, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # An installed package has its compiled files; those of this checkout are written in the first turn.
        surroundings = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        surroundings.pop("PYTHONDONTWRITEBYTECODE", None)
        for turn in range(repeats + 1):
            for statement in IMPORTS:
                _measure_import(found, statement, surroundings, counts=turn > 0)


def _measure_import(found: Measurements, statement: str, surroundings: dict[str, str], *, counts: bool) -> None:
    before, timed = ("import IPython, ipykernel; ", OURS[1]) if statement == KERNEL else ("", statement)
    code = (
        f"import sys, time; {before}begin = time.perf_counter(); {timed}; "
        "print(time.perf_counter() - begin, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT,
        cwd=Path(__file__).resolve().parents[2], env=surroundings,
    )  # fmt: skip
    if done.returncode:
        found.reasons[("import", statement)] = done.stderr.strip().splitlines()[-1]
    elif counts:
        seconds, has_torch = done.stdout.split()
        found.add(float(seconds), "import", statement)
        found.texts[("import", statement)] = has_torch


def import_table(found: Measurements) -> str:
    rows = [
        [name if name == KERNEL else f"`{name}`", found.cell("import", name), found.texts.get(("import", name), "")]
        for name in IMPORTS
    ]
    return "## Imports\n\nIn a fresh interpreter, with compiled files.\n\n" + table(
        ["statement", "ms", "torch imported"], rows
    )


DEATHS = ["ours", "session", "torch-fork", "torch-spawn", "accelerate", "torchrunx", "nbdistributed"]


def measure_deaths(found: Measurements, repeats: int) -> None:
    for _ in range(repeats):
        for name in found.chosen(DEATHS):
            measure_deaths_of(found, name)


def measure_deaths_of(found: Measurements, name: str) -> None:
    for how in ("die", "fail"):
        if (how, name) in found.reasons:
            continue
        with found.guarded(how, name), Contender(name, 2) as contender:
            contender.ask("prepare", timeout=LIMIT)
            answer = contender.ask("death", how, timeout=20)
            found.add(answer["seconds"], how, name)
            found.texts[(how, name)] = f"{answer['error']}: {answer['message']}"[:110]
    if ("killed", name) not in found.reasons:
        with found.guarded("killed", name), Contender(name, 2) as contender:
            contender.ask("prepare", timeout=LIMIT)
            begin_idle(contender, 2)
            seconds = contender.kill_and_time(GONE_LIMIT)
            if seconds is None:
                raise FailedError(f"some processes still live after {GONE_LIMIT:g} s")
            found.add(seconds, "killed", name)


def death_table(found: Measurements) -> str:
    rows = [
        [LABELS[name][0], *(found.cell(how, name) for how in ("die", "fail", "killed")),
         found.texts.get(("die", name), "-"), found.texts.get(("fail", name), "-")]
        for name in found.chosen(DEATHS)
    ]  # fmt: skip
    head = [
        "launcher",
        "a rank: SIGKILL",
        "a rank: ValueError",
        "the caller: SIGKILL",
        "first message",
        "second message",
    ]
    return (
        "## Deaths\n\nMilliseconds with 2 ranks, the other rank waiting in an all-reduce: until the caller has the "
        "exception, and until all processes have ended.\n\n" + table(head, rows)
    )
