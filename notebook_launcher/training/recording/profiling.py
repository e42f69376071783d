"""`torch.profiler` on one rank, from the handler that describes it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import profiler

from notebook_launcher.messaging import messages
from notebook_launcher.torch_lines import without_profiler_lines
from notebook_launcher.training.plugins import ProfileKwargs
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.profiler_util import FunctionEventAvg


def build_profiler(options: ProfileKwargs, *, acc_events: bool = False) -> profiler.profile:
    """Return the profiler, to be entered around the code that it records.

    With `output_trace_dir` it writes `profile_<rank>.json` there, a Chrome trace, when the block ends, be it by an
    exception. With a schedule it does so at the end of each cycle, so that the file holds the newest whole one.

    With `acc_events` the events of all cycles are kept, and sorted by operator when the block ends.
    """
    activities = None if options.activities is None else [_activity(name) for name in options.activities]
    schedule = None if options.schedule_option is None else profiler.schedule(**options.schedule_option)
    ready = options.on_trace_ready
    if options.output_trace_dir is not None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        ready = _exporter(Path(options.output_trace_dir) / f"profile_{rank}.json", ready)
    return profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=ready,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
        acc_events=acc_events,
    )


def _activity(name: Any) -> profiler.ProfilerActivity:
    if isinstance(name, profiler.ProfilerActivity):
        return name
    known = {key.lower(): activity for key, activity in profiler.ProfilerActivity.__members__.items()}
    if str(name).lower() not in known:
        raise ValueError(unknown("activities", name, list(known)))
    return known[str(name).lower()]


def _exporter(path: Path, ready: Callable[[profiler.profile], Any] | None) -> Callable[[profiler.profile], None]:
    def export(profile: profiler.profile) -> None:
        if ready is not None:
            ready(profile)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            profile.export_chrome_trace(os.fspath(path))
        except RuntimeError as error:
            warn_user(
                f"{path} was not written: {error} torch exports a trace only once; did on_trace_ready= export it "
                "already?"
            )

    return export


# --------------------------------------------------------------------------------------------------------------------
# A profile of some updates of a running training, which the kernel asks for with `run.profile(...)`.


MAX_OPERATORS = 50
MAX_TRACE = 100_000_000
"""Bytes of a compressed trace that is kept; the viewers in a browser fail at about ten times as much text."""
TAKEN = (
    "torch.profiler is active in this rank already, and there can be one at a time. End the block of "
    "accelerator.profile() or torch.profiler.profile() first, or read what it records."
)


class UpdateProfile:
    """A profile that is under way on this rank, begun after so many updates."""

    def __init__(self, rank: int, order: messages.ProfileOrder, update: int) -> None:
        self.end = update + order.updates
        """Number of updates after which the profile is complete."""
        self._rank, self._order, self._begin = rank, order, update
        self._problem, self._profiler = "", None
        if torch.autograd._profiler_enabled():  # noqa: SLF001 - no public name
            self._problem, self.end = TAKEN, update
            return
        # There is one cycle, but torch 2.11 warns of losing the events of others unless all are kept.
        self._profiler = build_profiler(ProfileKwargs(), acc_events=True)
        try:
            with without_profiler_lines():
                self._profiler.start()
        except RuntimeError as error:
            self._problem, self._profiler, self.end = f"torch.profiler did not start: {error}", None, update

    def finish(self, update: int) -> messages.Profiled:
        """End the profile and return its result; an error becomes a part of the result, and the training continues."""
        record: dict[str, Any] = {
            "rank": self._rank, "first_update": self._begin, "updates": min(update, self.end) - self._begin
        }  # fmt: skip
        if self._profiler is None:
            return messages.Profiled(**record, problem=self._problem)
        profiler, self._profiler = self._profiler, None
        try:
            with without_profiler_lines():
                profiler.stop()
            averages = profiler.key_averages()
            record["operators"], record["num_operators"] = _top(averages), len(averages)
            record["trace"], record["problem"] = self._write(profiler)
        except Exception as error:  # no failure here may stop the training
            record["problem"] = f"{type(error).__name__}: {error}"
        return messages.Profiled(**record)

    def _write(self, profiler: torch.profiler.profile) -> tuple[str, str]:
        """Write the trace; return its file, or the reason why it could not be written."""
        if self._order.folder is None:
            return "", "no trace was written: the run keeps no folder (runs_folder=None)"
        path = Path(self._order.folder) / f"trace_rank{self._rank}_update{self._begin}.json.gz"
        profiler.export_chrome_trace(str(path))
        if (size := path.stat().st_size) <= MAX_TRACE:
            return str(path), ""
        with contextlib.suppress(OSError):
            path.unlink()
        sizes = f"{size / 1e6:,.0f} MB was not kept: the limit is {MAX_TRACE / 1e6:,.0f} MB"
        return "", f"the trace of {sizes}. Profile fewer updates."


def _top(averages: list[FunctionEventAvg]) -> tuple[tuple[str, int, float, float, float, float], ...]:
    rows = [
        (
            str(event.key),
            int(event.count),
            event.self_cpu_time_total / 1e6,
            event.cpu_time_total / 1e6,
            event.self_device_time_total / 1e6,
            event.device_time_total / 1e6,
        )
        for event in averages
    ]
    # By the device that does the work: with a GPU, the CPU's time mostly goes into starting kernels.
    uses_device = any(row[4] for row in rows)
    rows.sort(key=lambda row: -(row[4] if uses_device else row[2]))
    return tuple(rows[:MAX_OPERATORS])
