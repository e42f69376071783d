"""A run with every kind of file in its folder, and all readings of such a folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher import attach, histogram, launch, open_run, report, runs
from notebook_launcher.history import run_folders
from notebook_launcher.history.encoding import encode_snapshot
from notebook_launcher.history.run_folders import SOCKET
from notebook_launcher.history.schema import RankFailure, RankUsage, RunChange, RunSetting
from notebook_launcher.widgets import compare
from tests.support.drawn_runs import phases_of, run_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from notebook_launcher import RecordedRun


def _train(scale: float) -> dict[str, Any]:
    for step in range(3):
        report(step=step, loss=scale / (step + 1), weights=histogram(torch.randn(100)), sample=torch.rand(3, 8, 8))
        print("step", step)
    return {"weights": torch.arange(1000.0) * scale, "name": "fine"}


def record_run(home: Path) -> Path:
    """Return the folder of a detached run that is over, whose summary has all that a summary can have."""
    run = launch(_train, 2, args=(0.5,), detached=True, runs_folder=home, tags=("first",))
    run.wait()
    folder = run.folder
    until(lambda: not (folder / SOCKET).exists())
    more = encode_snapshot(
        run_of(
            phases=phases_of(2),
            usage={0: RankUsage(times=(1.0, 2.0, 3.0), memory=(1, 2, 3), load=(None, 1.0, 1.0))},
            changes=(RunChange(name="lr", before=0.1, after=0.2, update=3, step=3, time=1.0),),
            settings=(RunSetting(name="lr", value=0.2, kind="positive"),),
            failures=(RankFailure(rank=1, summary="ValueError: boom", traceback="Traceback", last_lines=("a", "b")),),
        )
    )
    path = folder / run_folders.SUMMARY
    added = {name: more[name] for name in ("phases", "usage", "changes", "settings", "failures")}
    path.write_text(json.dumps({**json.loads(path.read_text()), **added}))
    with (folder / run_folders.PICTURES).open("a") as file:
        entry = {"rank": 0, "step": 1, "time": 1.0, "name": "words", "file": "picture-99.csv"}
        file.write(json.dumps(entry) + "\n")
    (folder / "picture-99.csv").write_text("word,count\nyes,3\nno,4\n")
    recorded = open_run(folder)
    recorded.edit(name="the first", tags=["good"], notes="to be kept")
    return folder


def _values(run: RecordedRun) -> list[Any]:
    results = attach(run.folder, show=False).result(30)
    return [results[0], results[1]]


READINGS: dict[str, Callable[[RecordedRun], object]] = {
    "attributes": lambda run: (run.name, run.tags, run.notes, run.source, run.environment, run.state, run.seed),
    "config": lambda run: run.config,
    "html": lambda run: run._repr_html_().encode(),
    "list": lambda run: (repr(runs(run.folder.parent)).encode(), runs(run.folder.parent).as_html().encode()),
    "logs": lambda run: (run.logs(0), run.log_order(100)),
    "metrics": lambda run: run.metrics,
    "pictures": lambda run: [repr(picture._repr_mimebundle_()) for picture in run.pictures],
    "repr": lambda run: repr(run).encode(),
    "svg": lambda run: (run.svg().encode(), run.svg(axis="time", log=True).encode()),
    "comparison": lambda run: (repr(compare(run)).encode(), compare(run).as_html().encode()),
    "values": _values,
}
