"""From the call to the results, cold and warm."""

from __future__ import annotations

import time

from support.measurements import EVERYBODY, LABELS, LIMIT, PAUSE, SLOW, SLOW_REPEATS, Measurements
from support.process import Contender, contenders
from support.report import megabytes, table

ROW = 100
"""Calls of a session right after each other, as in a loop of a cell: the caches hold the code of the earlier ones."""
WARM_ALONE = ("bare", "ours-")
"""Names of contenders that have no cold call of their own begin so."""


def measure_cold(found: Measurements, num_ranks: int, repeats: int) -> None:
    for _ in range(repeats):
        for name in found.chosen([name for name in EVERYBODY if not name.startswith(WARM_ALONE)]):
            key = ("cold", name, num_ranks)
            if key in found.reasons:
                continue
            with found.guarded(*key), Contender(name, num_ranks) as contender:
                found.add(contender.ask("cold", timeout=LIMIT)["seconds"], *key)


def measure_warm(found: Measurements, num_ranks: int) -> None:
    with contenders(found.chosen(EVERYBODY), num_ranks) as started:
        ready = []
        for contender in started:
            with found.guarded("warm", contender.name, num_ranks):
                answer = contender.ask("prepare", timeout=LIMIT)
                if "private" in answer:
                    found.texts["private", contender.name] = f", {megabytes(answer['private'])} MB private"
                contender.settle()
                contender.ask("trivial", timeout=LIMIT)
                ready.append(contender)
        take_turns(found, ready, num_ranks)


def take_turns(found: Measurements, ready: list[Contender], num_ranks: int) -> None:
    for turn in range(found.repeats):
        for contender in ready[turn % len(ready) :] + ready[: turn % len(ready)]:
            key = ("warm", contender.name, num_ranks)
            slow = (found.median(*key) or 0.0) > SLOW
            if key in found.reasons or (slow and len(found.samples[key]) >= SLOW_REPEATS):
                continue
            with found.guarded(*key):
                found.add(contender.ask("trivial", timeout=LIMIT)["seconds"], *key)
                if contender.name == "session":
                    row = contender.ask("row", ROW, timeout=LIMIT)
                    found.add(row["seconds"], "row", "session", num_ranks)
            time.sleep(PAUSE)


def launch_tables(found: Measurements, counts: list[int]) -> str:
    columns = [f"{count} rank{'s' * (count > 1)}" for count in counts]
    warm, cold = [], []
    for name in found.chosen(EVERYBODY):
        label, note = LABELS[name]
        note += found.texts.get(("private", name), "")
        base = found.median("warm", "bare", 2)
        mine = found.median("warm", name, 2)
        ratio = f"{mine / base:.1f}" if base and mine else "-"
        warm.append([label, *(found.cell("warm", name, count) for count in counts), ratio, note])
        if name == "session":
            row = [found.cell("row", name, count) for count in counts]
            warm.append([f"{label}, {ROW} in a row", *row, "-", "the median of calls right after each other"])
        if not name.startswith(WARM_ALONE):
            cold.append([label, *(found.cell("cold", name, count) for count in counts)])
    return (
        "## From the call to the results, warm\n\nMilliseconds: median (quartiles), for a function that returns the "
        "size of its group. First calls are not counted.\n\n"
        + table(["launcher", *columns, "2 ranks / bare fork", "what it does"], warm)
        + "\n## From the call to the results, cold\n\nMilliseconds of the first call of a fresh interpreter, with the "
        "launcher's import and, for launchers whose ranks stay, with the start of the ranks.\n\n"
        + table(["launcher", *columns], cold)
    )
