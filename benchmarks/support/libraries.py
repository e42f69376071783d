"""Launches of functions that use libraries which the caller has imported, as cells at the top of a notebook do."""

from __future__ import annotations

import time

from support.measurements import LABELS, LIMIT, PAUSE, Measurements
from support.process import contenders
from support.report import megabytes, table

KINDS = ("transformers", "pandas + scikit-learn")
CONTENDERS = ["ours", "session", "accelerate"]


def measure_libraries(found: Measurements, repeats: int) -> None:
    for kind in KINDS:
        for _ in range(repeats):
            with contenders(found.chosen(CONTENDERS), 2) as started:
                for one in started:
                    key = (kind, one.name)
                    with found.guarded(*key):
                        one.ask("prompt", timeout=LIMIT)
                        found.add(one.ask("load", kind, timeout=LIMIT)["seconds"], *key, "import")
                        found.add(one.ask("library", kind, timeout=LIMIT)["seconds"], *key, "first")
                        one.settle()
                        one.ask("library", kind, timeout=LIMIT)
                for turn in range(found.repeats):
                    for one in started[turn % len(started) :] + started[: turn % len(started)]:
                        if (kind, one.name) in found.reasons:
                            continue
                        with found.guarded(kind, one.name):
                            answer = one.ask("library", kind, timeout=LIMIT)
                            found.add(answer["seconds"], kind, one.name, "warm")
                            found.add(answer["private"], kind, one.name, "private")
                        time.sleep(PAUSE)


def library_table(found: Measurements) -> str:
    rows = []
    for kind in KINDS:
        for name in found.chosen(CONTENDERS):
            cells = [found.cell(kind, name, what) for what in ("import", "first", "warm")]
            private = found.median(kind, name, "private")
            rows.append([kind, LABELS[name][0], *cells, megabytes(private) if private else "-"])
    return (
        "## Functions that use libraries\n\nThe caller has imported them. Milliseconds: median (quartiles), "
        "2 ranks. The first launch follows the import at once; a session's includes the start of its ranks. Private "
        "memory of a rank in MB.\n\n"
        + table(["function", "launcher", "import", "first launch", "warm launch", "private"], rows)
    )
