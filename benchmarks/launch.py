"""Measure launching side by side with other launchers: `python benchmarks/launch.py [--quick]`.

Every contender is a process of its own; within a table all of them are up at the same time and take
turns, so that a noisy moment hits everybody alike. Who cannot do something has a row that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import _process
import _report
from _process import Contender, FailedError, contenders
from _report import median, megabytes, milliseconds, table

LABELS = {
    "ours": ("notebook_launch", "group up, results back"),
    "ours-fork": ("notebook_launch, start_method=fork", "group up, results back"),
    "session": ("Session.run", "ranks and group stay; results back"),
    "bare": ("os.fork + os._exit, torch imported", "reference: no group, no results"),
    "bare-compiler": ("the same, torch's compiler imported too", "reference: no group, no results"),
    "bare-huge": ("the same, in huge pages (as our fork server)", "reference: no group, no results"),
    "torch-fork": ("torch start_processes, fork", "group made by hand; no results"),
    "torch-spawn": ("torch start_processes, spawn", "group made by hand; no results"),
    "accelerate": ("accelerate notebook_launcher", "fork; group made by PartialState(cpu=True); no results"),
    "torchrunx": ("torchrunx Launcher", "group up, results back"),
    "nbdistributed": ("nbdistributed %%distributed", "ranks and group stay; values come back as text"),
}
RIVALS = ["torch-fork", "torch-spawn", "accelerate", "torchrunx", "nbdistributed"]
EVERYBODY = list(LABELS)
SLOW = 1.0
"""A contender whose call takes longer, in seconds, is measured `SLOW_REPEATS` times."""
SLOW_REPEATS = 3
LIMIT = 90.0
"""Seconds that any answer may take."""
GONE_LIMIT = 10.0
PAUSE = 0.03
"""Seconds between two measurements, in which what the last one left to do is done."""


class Measurements:
    """What was measured: samples by (table, contender, what), and why something is missing."""

    def __init__(self, repeats: int, only: list[str] | None) -> None:
        self.repeats = repeats
        self.samples: dict[tuple[Any, ...], list[float]] = {}
        self.reasons: dict[tuple[Any, ...], str] = {}
        self.texts: dict[tuple[Any, ...], str] = {}
        self._only = only

    def chosen(self, names: list[str]) -> list[str]:
        return [name for name in names if self._only is None or name in self._only]

    def add(self, value: float, *key: Any) -> None:
        self.samples.setdefault(key, []).append(value)

    def cell(self, *key: Any, form: Callable[[list[float]], str] = milliseconds) -> str:
        if key in self.reasons:
            return f"failed: {self.reasons[key][:160]}"
        return form(self.samples[key]) if key in self.samples else "-"

    def median(self, *key: Any) -> float | None:
        return median(self.samples[key]) if key in self.samples else None

    @contextlib.contextmanager
    def guarded(self, *key: Any) -> Any:
        try:
            yield
        except FailedError as error:
            self.reasons[key] = str(error)
            say(f"  {key}: {error}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# 1. From the call to the results.


def measure_cold(found: Measurements, num_ranks: int, repeats: int) -> None:
    for _ in range(repeats):
        for name in found.chosen([name for name in EVERYBODY if not name.startswith(("bare", "ours-fork"))]):
            key = ("cold", name, num_ranks)
            if key in found.reasons:
                continue
            with found.guarded(*key), Contender(name, num_ranks) as one:
                found.add(one.ask("cold", timeout=LIMIT)["seconds"], *key)


def measure_warm(found: Measurements, num_ranks: int) -> None:
    with contenders(found.chosen(EVERYBODY), num_ranks) as started:
        ready = []
        for one in started:
            with found.guarded("warm", one.name, num_ranks):
                one.ask("prepare", timeout=LIMIT)
                one.settle()
                one.ask("trivial", timeout=LIMIT)
                ready.append(one)
        take_turns(found, ready, num_ranks)


def take_turns(found: Measurements, ready: list[Contender], num_ranks: int) -> None:
    for turn in range(found.repeats):
        for one in ready[turn % len(ready) :] + ready[: turn % len(ready)]:
            key = ("warm", one.name, num_ranks)
            slow = (found.median(*key) or 0.0) > SLOW
            if key in found.reasons or (slow and len(found.samples[key]) >= SLOW_REPEATS):
                continue
            with found.guarded(*key):
                found.add(one.ask("trivial", timeout=LIMIT)["seconds"], *key)
            time.sleep(PAUSE)


def launch_tables(found: Measurements, counts: list[int]) -> str:
    columns = [f"{count} rank{'s' * (count > 1)}" for count in counts]
    warm, cold = [], []
    for name in found.chosen(EVERYBODY):
        label, note = LABELS[name]
        base = found.median("warm", "bare", 2)
        mine = found.median("warm", name, 2)
        ratio = f"{mine / base:.1f}" if base and mine else "-"
        warm.append([label, *(found.cell("warm", name, count) for count in counts), ratio, note])
        if not name.startswith(("bare", "ours-fork")):
            cold.append([label, *(found.cell("cold", name, count) for count in counts)])
    return (
        "## From the call to the results, warm\n\nMilliseconds: median (quartiles), of a function that returns the "
        "size of its group. The first calls are not counted.\n\n"
        + table(["launcher", *columns, "2 ranks / bare fork", "what it does"], warm)
        + "\n## The same, cold\n\nMilliseconds of the first call of a fresh interpreter, with the launcher's import; "
        "for those whose ranks stay, with their start.\n\n" + table(["launcher", *columns], cold)
    )


# 2. A gigabyte there, a gigabyte back.

BIG = ["ours", "torch-fork", "torch-spawn", "accelerate", "torchrunx", "nbdistributed"]
BIG_RANKS = 4


def back_memory() -> None:
    """Use and free memory once: a virtual machine takes its host's at first use, which can take seconds."""
    size = min(16e9, 0.6 * psutil.virtual_memory().available)
    code = f"bytearray({int(size)})[::4096] = bytes(-(-{int(size)} // 4096))"
    subprocess.run([sys.executable, "-c", code], check=False)


def measure_big(found: Measurements, repeats: int) -> None:
    back_memory()
    with contenders(found.chosen(BIG), BIG_RANKS) as started:
        for one in started:
            with found.guarded("up", one.name):
                one.ask("prepare", timeout=LIMIT)
                one.settle()
        for _ in range(repeats):
            for one in started:
                measure_big_once(found, one)
        for one in started:
            for kind in ("none", "array", "tensor"):
                with found.guarded("memory", one.name, kind):
                    for what, size in one.ask("capture_memory", kind, timeout=LIMIT).items():
                        found.add(size, "memory", one.name, kind, what)


def measure_big_once(found: Measurements, one: Contender) -> None:
    with contextlib.suppress(FailedError):
        for what, seconds in one.ask("copy", timeout=LIMIT).items():
            found.add(seconds, "copy", what)
    for kind in ("none", "array", "tensor"):
        key = ("capture", one.name, kind)
        if key not in found.reasons:
            with found.guarded(*key):
                found.add(one.ask("capture", kind, timeout=LIMIT)["seconds"], *key)
    if ("return", one.name) not in found.reasons:
        with found.guarded("return", one.name):
            answer = one.ask("returned", timeout=LIMIT)
            found.add(answer["seconds"], "return", one.name)
            found.add(answer["peak"], "peak", one.name)


def big_table(found: Measurements) -> str:
    rows = []
    copy = found.median("copy", "new") or float("nan")
    for name in found.chosen(BIG):
        cells = [LABELS[name][0]]
        for kind in ("array", "tensor"):
            extra = extra_time(found, name, kind)
            reason = found.reasons.get(("capture", name, kind))
            cells.append(f"{1e3 * extra:,.0f} ({extra / copy:.2f})" if extra is not None else f"failed: {reason}"[:120])
            cells.append(extra_memory(found, name, kind))
        back = found.median("return", name)
        cells.append(f"{1e3 * back:,.0f} ({back / copy:.2f})" if back else found.cell("return", name))
        cells.append(found.cell("peak", name, form=lambda values: megabytes(max(values))))
        rows.append(cells)
    head = ["launcher"]
    for kind in ("array", "tensor"):
        head += [f"{kind} there: ms (copies)", "ranks' memory, MB: shared out / private"]
    head += ["state back: ms (copies)", "kernel's peak, MB"]
    return (
        f"## One GB to {BIG_RANKS} ranks, and back from rank 0\n\n"
        f"One memory copy of 1 GB took {found.cell('copy', 'new')} ms into new memory, which is what the figures in "
        f"brackets are multiples of, and {found.cell('copy', 'used')} ms into memory that was in use already.\n\n"
        "*There*: until the function has begun on every rank, less the same without the data. *Memory*: what all ranks "
        "together have more after reading all of it, proportional to sharing / private. *Back*: from the end of "
        "the function to a dictionary of 16 tensors in the caller; by hand through a queue for torch, through "
        "`torch.save` into memory for Accelerate. *Peak*: how far the caller's resident memory rose, with all of it "
        "read: 1,074 MB are the result itself.\n\n" + table(head, rows)
    )


def extra_time(found: Measurements, name: str, kind: str) -> float | None:
    there, without = found.median("capture", name, kind), found.median("capture", name, "none")
    return None if there is None or without is None else there - without


def extra_memory(found: Measurements, name: str, kind: str) -> str:
    sizes = []
    for what in ("pss", "private"):
        there, without = (found.median("memory", name, which, what) for which in (kind, "none"))
        if there is None or without is None:
            return "-"
        sizes.append(megabytes(max(0.0, there - without)))
    return " / ".join(sizes)


# 3. Memory of idle ranks; 4. import; 5. deaths.

IDLE = ["session", "ours", "torch-fork", "torch-spawn", "accelerate", "nbdistributed"]


def measure_idle(found: Measurements) -> None:
    for name in found.chosen(IDLE):
        with found.guarded("idle", name), Contender(name, 2) as one:
            one.ask("prepare", timeout=LIMIT)
            one.settle()
            pids = one.ask("look", timeout=LIMIT)["pids"] if name in ("session", "nbdistributed") else begin_idle(one, 2)
            one.settle()
            ours = [memory_if_alive(pid) for pid in pids]
            rest = [memory_if_alive(pid) for pid in one.family() if pid not in pids and pid != one.process.pid]
            found.add(median([sizes["pss"] for sizes in ours]), "idle", name, "pss")
            found.add(median([sizes["private"] for sizes in ours]), "idle", name, "private")
            found.add(sum(sizes["pss"] for sizes in [*ours, *rest]), "idle", name, "all")


def memory_if_alive(pid: int) -> dict[str, int]:
    import _contender

    try:
        return _contender.memory_of(pid)
    except (OSError, KeyError):
        return {"pss": 0, "private": 0}


def begin_idle(one: Contender, num_ranks: int) -> list[int]:
    """Launch a function that does not end; return the ranks' processes once they run it."""
    import json

    folder = Path(one.ask("folder", timeout=LIMIT)["folder"])
    one.tell("idle")
    deadline = time.monotonic() + LIMIT
    while len(files := list(folder.glob("*.json"))) < num_ranks:
        if time.monotonic() > deadline:
            raise FailedError("the ranks did not start")
        time.sleep(0.02)
    one.family()
    return [json.loads(file.read_text())["pid"] for file in files]


def idle_table(found: Measurements) -> str:
    rows = [
        [LABELS[name][0], *(found.cell("idle", name, what, form=lambda values: megabytes(values[0])) for what in
         ("pss", "private", "all")), found.reasons.get(("idle", name), "")]
        for name in found.chosen(IDLE)
    ]  # fmt: skip
    return (
        "## Memory of two idle ranks\n\nMB. The whole tree is everything but the caller: for us with fork server and "
        "supervisor.\n\n" + table(["launcher", "rank, proportional", "rank, private", "whole tree", ""], rows)
    )


IMPORTS = {
    "import notebook_launcher": "import notebook_launcher",
    "from notebook_launcher import notebook_launch": "from notebook_launcher import notebook_launch",
    "from accelerate import notebook_launcher": "from accelerate import notebook_launcher",
    "import torchrunx": "import torchrunx",
    "import torch": "import torch",
}


def measure_imports(found: Measurements, repeats: int) -> None:
    for _ in range(repeats):
        for label, statement in IMPORTS.items():
            code = (
                f"import sys, time; begin = time.perf_counter(); {statement}; "
                "print(time.perf_counter() - begin, 'torch' in sys.modules)"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT,
                cwd=Path(__file__).resolve().parents[1],
            )  # fmt: skip
            if done.returncode:
                found.reasons[("import", label)] = done.stderr.strip().splitlines()[-1]
                continue
            seconds, has_torch = done.stdout.split()
            found.add(float(seconds), "import", label)
            found.texts[("import", label)] = has_torch


def import_table(found: Measurements) -> str:
    rows = [[f"`{label}`", found.cell("import", label), found.texts.get(("import", label), "")] for label in IMPORTS]
    return "## Imports\n\nIn a fresh interpreter.\n\n" + table(["statement", "ms", "torch imported"], rows)


DEATHS = ["ours", "session", "torch-fork", "torch-spawn", "accelerate", "torchrunx", "nbdistributed"]


def measure_deaths(found: Measurements, repeats: int) -> None:
    for _ in range(repeats):
        for name in found.chosen(DEATHS):
            measure_deaths_of(found, name)


def measure_deaths_of(found: Measurements, name: str) -> None:
    for how in ("die", "fail"):
        if (how, name) in found.reasons:
            continue
        with found.guarded(how, name), Contender(name, 2) as one:
            one.ask("prepare", timeout=LIMIT)
            answer = one.ask("death", how, timeout=20)
            found.add(answer["seconds"], how, name)
            found.texts[(how, name)] = f"{answer['error']}: {answer['message']}"[:110]
    if ("killed", name) not in found.reasons:
        with found.guarded("killed", name), Contender(name, 2) as one:
            one.ask("prepare", timeout=LIMIT)
            begin_idle(one, 2)
            seconds = one.kill_and_time(GONE_LIMIT)
            if seconds is None:
                raise FailedError(f"processes are left after {GONE_LIMIT:g} s")
            found.add(seconds, "killed", name)


def death_table(found: Measurements) -> str:
    rows = [
        [LABELS[name][0], *(found.cell(how, name) for how in ("die", "fail", "killed")),
         found.texts.get(("die", name), "-"), found.texts.get(("fail", name), "-")]
        for name in found.chosen(DEATHS)
    ]  # fmt: skip
    head = ["launcher", "SIGKILL of a rank", "ValueError on a rank", "SIGKILL of the caller", "first says", "second says"]
    return (
        "## Deaths\n\nMilliseconds with 2 ranks, the other one waiting in an all-reduce: until the caller has the "
        "exception, and until no process is left.\n\n" + table(head, rows)
    )


# The promises.


def promise_table(found: Measurements) -> str:
    ours, bare = found.median("warm", "ours", 2), found.median("warm", "bare", 2)
    copy = found.median("copy", "new")
    rows = [
        promise("2 ranks, warm: <= 3 x a bare fork-and-exit", ours, 3, bare),
        promise("the same, <= 0.4 x accelerate", ours, 0.4, found.median("warm", "accelerate", 2)),
        promise("Session.run: <= 3 ms", found.median("warm", "session", 2), 0.003, None),
        *(promise(f"1 GB captured ({kind}), 4 ranks: <= 2 x a memory copy", extra_time(found, "ours", kind), 2, copy)
          for kind in ("array", "tensor")),
        memory_promise(found),
        promise("1 GB returned: <= 2 x a memory copy", found.median("return", "ours"), 2, copy),
        peak_promise(found),
        *(promise(f"a rank dies ({text}): < 2 s", found.median(how, "ours"), 2.0, None)
          for how, text in (("die", "SIGKILL"), ("fail", "ValueError"))),
        promise("the kernel is killed: nothing left after 2 s", found.median("killed", "ours"), 2.0, None),
        promise("import: <= 60 ms, without torch", found.median("import", "import notebook_launcher"), 0.06, None),
    ]  # fmt: skip
    return "## Promises\n\nMedians.\n\n" + table(["promise", "measured", "held"], rows)


def promise(text: str, value: float | None, limit: float, base: float | None) -> list[str]:
    """Return a row; `limit` is in multiples of `base`, or in seconds where that is None."""
    if value is None or (base is None and " x " in text):
        return [text, "not measured", "-"]
    measured = f"{1e3 * value:.1f} ms"
    if base is not None:
        measured += f" = {value / base:.2f} x {1e3 * base:.1f} ms"
    return [text, measured, "yes" if value <= limit * (base or 1.0) else "**no**"]


def memory_promise(found: Measurements) -> list[str]:
    text = "1 GB captured, 4 ranks: one copy in memory"
    sizes = [
        (found.median("memory", "ours", kind, "pss") or 0) - (found.median("memory", "ours", "none", "pss") or 0)
        for kind in ("array", "tensor")
        if found.median("memory", "ours", kind, "pss") is not None
    ]
    if not sizes:
        return [text, "not measured", "-"]
    return [text, " and ".join(megabytes(size) for size in sizes) + " MB", "yes" if max(sizes) < 1.1e9 else "**no**"]


def peak_promise(found: Measurements) -> list[str]:
    text = "1 GB returned: no second full copy in the kernel"
    peak = found.median("peak", "ours")
    if peak is None:
        return [text, "not measured", "-"]
    return [text, f"peak rises by {megabytes(peak)} MB", "yes" if peak < 1.2e9 else "**no**"]


SECTIONS = ("launch", "big", "idle", "imports", "deaths")


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 ranks only, few repeats, not written to results/")
    parser.add_argument("--repeats", type=int, help="warm launches of each contender (20; 5 with --quick)")
    parser.add_argument("--only", help=f"sections and contenders, with commas: {', '.join([*SECTIONS, *LABELS])}")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else []
    if unknown := [word for word in wanted if word not in (*SECTIONS, *LABELS)]:
        parser.error(f"unknown in --only: {', '.join(unknown)}")
    sections = [word for word in SECTIONS if word in wanted] or list(SECTIONS)
    only = [word for word in wanted if word in LABELS] or None
    found = Measurements(options.repeats or (5 if options.quick else 20), only)
    _process.adopt_orphans()
    began = time.monotonic()
    head = f"# Launching, side by side\n\n{_report.machine()}"
    body = measure(found, sections, quick=options.quick)
    minutes = (time.monotonic() - began) / 60
    text = f"{head}\nOne run of `python benchmarks/launch.py`, {minutes:.0f} minutes.\n\n" + "\n".join(body)
    print(text)
    if not options.quick and not wanted:
        say(f"written to {_report.write('launch', text)}")


def measure(found: Measurements, sections: list[str], *, quick: bool) -> list[str]:
    counts, few = ([2] if quick else [1, 2, 4, 8]), (1 if quick else 3)
    body = []
    for section in sections:
        say(section)
        match section:
            case "launch":
                for count in counts:
                    measure_cold(found, count, few)
                    measure_warm(found, count)
                body.append(launch_tables(found, counts))
            case "big":
                measure_big(found, few)
                body.append(big_table(found))
            case "idle":
                measure_idle(found)
                body.append(idle_table(found))
            case "imports":
                measure_imports(found, 2 * few + 1)
                body.append(import_table(found))
            case "deaths":
                measure_deaths(found, few)
                body.append(death_table(found))
    return [*body, promise_table(found)]


if __name__ == "__main__":
    main()
