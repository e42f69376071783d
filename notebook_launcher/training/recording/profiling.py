"""`torch.profiler` on one rank, from the handler that describes it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import profiler

from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.training.plugins import ProfileKwargs

__all__ = ["build_profiler"]


def build_profiler(options: ProfileKwargs, *, acc_events: bool = False) -> profiler.profile:
    """Return the profiler, to be entered around the code that it records.

    With `output_trace_dir` it writes `profile_<rank>.json` there, a Chrome trace, when the block ends, be it by an
    exception. With a schedule it does so at the end of each cycle, so that the file holds the newest whole one.

    Args:
        options: Arguments of the profiler, and its folder.
        acc_events: Events of all cycles are kept, and sorted by operator when the block ends.

    Raises:
        ValueError: `activities` has a name that torch does not know.
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
        close = difflib.get_close_matches(str(name).lower(), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"activities holds {name!r}, which is unknown.{hint} It can hold {', '.join(map(repr, known))}."
        )
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
