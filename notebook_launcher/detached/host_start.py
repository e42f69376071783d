"""The start of a detached run: a kernel checks and packs the call, starts a host, and hands the call over."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher import travel
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.detached.requests import HostOrder, HostReady, RequestRefused, SessionOrder
from notebook_launcher.engines.this_machine import start_host
from notebook_launcher.errors import ConfigError, ResourceError
from notebook_launcher.history import run_folders
from notebook_launcher.kernel.calls.argument_text import describe_arguments
from notebook_launcher.kernel.calls.checks import check_call
from notebook_launcher.kernel.calls.origin import describe_environment, source_with_needs
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.messaging.channel import channel_pair, read_tail
from notebook_launcher.travel import cells
from notebook_launcher.wording.value_text import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.config import LaunchConfig

__all__ = ["MAX_AGE", "detached_options", "hand_over", "start_detached"]

MAX_AGE = 7 * 86_400.0
"""Seconds after which a detached run without `timeout` is stopped: no user may know of it any more."""
LAST_WORDS = 4000
"""Bytes at the end of a host's standard error that are shown if it does not start."""
HOST = "notebook_launcher.detached.host"
"""The module of a host's life, by name: the kernel does not import it."""


def start_detached(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, config: LaunchConfig
) -> AttachedRun:
    """Start a run that outlives this kernel, and return the handle on it; raises before anything starts, as `launch`.

    Raises:
        ConfigError: An option, the function or its arguments cannot work, or not in a detached run.
        CaptureError: Something that `fn` captured cannot travel.
        ResourceError: The host did not start.
    """
    config = detached_options(config)
    plan = make_plan(config)
    call = check_call(fn, args, kwargs, launcher="launch(fn, 2, detached=True")
    order = HostOrder(
        plan=plan,
        name=config.name or name_of(fn),
        arguments=describe_arguments(*call),
        source=source_with_needs(fn),
        environment=describe_environment(),
        places=cells.places(),
        surroundings=plan.setup(many_calls=False),
    )
    with contextlib.closing(travel.pack_call(call)) as parcel:
        return AttachedRun(Path(hand_over(order, parcel.fileno(), call=call).folder))


def detached_options(config: LaunchConfig) -> LaunchConfig:
    """Return the options with a limit of age; raises `ConfigError` for options that need the kernel."""
    if config.start_method == "fork":
        raise ConfigError(
            "start_method='fork' with detached=True: the ranks would be forks of this kernel. Leave one of them out.",
            field="start_method",
        )
    if run_folders.find_home(config.runs_folder) is None:
        off = "runs_folder=None" if config.runs_folder is None else f"{run_folders.VARIABLE}=off"
        raise ConfigError(
            f"{off} with detached=True: the run's folder is where attach() finds the run. Name a folder.",
            field="runs_folder",
        )
    return config if config.timeout is not None else dataclasses.replace(config, timeout=MAX_AGE)


def hand_over(order: HostOrder | SessionOrder, *fds: int, call: travel.FunctionCall | None = None) -> HostReady:
    """Start a host and return its answer to an order; raises `ResourceError`, and the error of a refused order.

    Args:
        order: The run or session that the host conducts.
        fds: Descriptors beside the order.
        call: The call of a run, for the fork server to prepare for; None for a session.
    """
    ours, theirs = channel_pair()
    errors = -1
    try:
        with theirs:
            errors = start_host(HOST, theirs.fileno(), order.surroundings.environ, call)
        with contextlib.suppress(BrokenPipeError):
            ours.send(order, fds)
        match ours.receive():
            case HostReady() as ready, _:
                return ready
            case RequestRefused(error=error), _:
                raise error
        reason = read_tail(errors, LAST_WORDS) or "its process ended without an error message"
    finally:
        ours.close()
        if errors >= 0:
            os.close(errors)
    raise ResourceError(
        f"the run's host did not start: {reason}. notebook-launcher's doctor() shows the limits of this machine."
    )
