"""Reading a run from whatever stands for it: a run, a recorded run, an id, a folder, or results."""

from __future__ import annotations

import os
from typing import Any

from notebook_launcher.archive.recorded import RecordedRun
from notebook_launcher.errors import ConfigError
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunSnapshot
from notebook_launcher.kernel.results import Results
from notebook_launcher.wording.text import one_line

__all__ = ["read_run"]


def read_run(run: Any, place: int) -> tuple[RunSnapshot, Curves]:
    """Return the snapshot and the curves of a run as they are now.

    Args:
        run: A `Run`, a `RecordedRun`, an id, a folder, or `Results`, which have curves if the run's folder exists.
        place: Position of the argument, for the error.

    Raises:
        ConfigError: `run` is none of these.
        LookupError: No run with this id has left a folder.
    """
    if isinstance(run, (str, os.PathLike)):
        from notebook_launcher.archive.opening import open_run

        run = open_run(run)
    if isinstance(run, Results):
        if run.folder is None or not run.folder.is_dir():
            return _snapshot_of(run, place), Curves()
        run = RecordedRun(run.folder)
    if not all(callable(getattr(run, name, None)) for name in ("snapshot", "metrics_since")) or isinstance(run, type):
        raise ConfigError(_no_run(run, place))
    curves = Curves()
    curves.fold(run.metrics_since(0)[0])
    return run.snapshot(), curves


def _no_run(run: Any, place: int) -> str:
    hint = "Pass what launch() returned, or an id that runs() lists."
    if isinstance(run, (list, tuple)):
        hint = "Pass the runs one by one: compare(*runs)."
    elif callable(run):
        hint = "Pass the run, not the function: run = launch(function, 2)."
    kind = "type" if isinstance(run, type) else type(run).__name__
    return f"argument {place} of compare() is not a run: {one_line(repr(run), 80)} ({kind}). {hint}"


def _snapshot_of(results: Results, place: int) -> RunSnapshot:
    """Return a snapshot with as much of the run as its results hold."""
    failures = {failure.rank: failure for failure in results.failures}
    ranks = tuple(
        RankSnapshot(
            rank=summary.rank,
            state=summary.state,
            reason=failures[summary.rank].summary if summary.rank in failures else "",
            seconds=summary.seconds,
            peak_memory=summary.peak_memory,
            returned=results.short(summary.rank),
        )
        for summary in results.ranks
    )
    return RunSnapshot(
        id="",
        name=f"results {place}",
        state="failed" if failures else "stopped" if results.stopped_by else "done",
        started=0.0,
        seconds=results.seconds,
        num_processes=len(results),
        summary="",
        seed=results.seed,
        restarts=results.restarts,
        stopped_by=results.stopped_by,
        timed_out=results.timed_out,
        ranks=ranks,
        failures=tuple(
            RankFailure(rank=failure.rank, summary=failure.summary, victim=failure.victim)
            for failure in results.failures
        ),
    )
