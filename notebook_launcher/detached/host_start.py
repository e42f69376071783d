"""The start of a detached run: a kernel checks and packs the call, starts a host, and hands the call over."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher import travel
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.detached.attached_session import AttachedSession
from notebook_launcher.detached.requests import CallOrder, HostOrder
from notebook_launcher.detached.session_folders import check_name_is_free
from notebook_launcher.engines.fork_server_handle import fork_server
from notebook_launcher.errors import ConfigError, ResourceError
from notebook_launcher.history import run_folders
from notebook_launcher.kernel.calls.call_scope import CallScope
from notebook_launcher.kernel.calls.checks import check_call, describe_arguments
from notebook_launcher.kernel.calls.everywhere import setup_steps
from notebook_launcher.kernel.calls.origin import describe_environment, source_with_needs
from notebook_launcher.kernel.display.sink import teller
from notebook_launcher.kernel.failures import failure_display
from notebook_launcher.kernel.latch import held_interrupts
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.messaging.channel import channel_pair, read_tail
from notebook_launcher.travel import cells
from notebook_launcher.wording import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.requests import HostAnswer


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
    steps = setup_steps(config)
    config = detached_options(config)
    plan = make_plan(config)
    call = check_call(fn, args, kwargs, launcher="launch(fn, 2, detached=True", steps=steps)
    order = HostOrder(
        plan=plan,
        surroundings=plan.setup(many_calls=False),
        call=CallOrder(
            scope=CallScope(name=config.name or name_of(fn), arguments=describe_arguments(*call[:3])),
            source=source_with_needs(fn),
            environment=describe_environment(),
            places=cells.places(),
        ),
    )
    with contextlib.closing(travel.pack_call(call, tell=teller(config))) as parcel:
        return AttachedRun(hand_over(order, parcel.fileno(), call=call))


def detached_options(config: LaunchConfig) -> LaunchConfig:
    """Return a host's options: with a limit of age, without `setup`, which goes with each call.

    Raises:
        ConfigError: An option needs the kernel.
    """
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
    timeout = MAX_AGE if config.timeout is None else config.timeout
    return dataclasses.replace(config, timeout=timeout, setup=None)


def hand_over(order: HostOrder, *fds: int, call: travel.FunctionCall | None = None) -> Path:
    """Start a host and return its folder; raises `ResourceError`, and the error of an order that the host refuses.

    An interrupt before the host is up gives the run up. Later the run goes on, and the interrupt's text gives its id.
    """
    ours, theirs = channel_pair()
    errors = -1
    answer: HostAnswer | None = None
    try:
        with theirs:
            errors = fork_server().start_host(HOST, theirs.fileno(), order.surroundings.environ, call)
        if ours.receive() is not None:  # The host is up.
            # From here on the run begins, so an interrupt waits until it can give the run's id.
            with held_interrupts():
                with contextlib.suppress(BrokenPipeError):
                    ours.send(order, fds)
                received = ours.receive()
                answer = None if received is None else received[0]
        if answer is not None:
            return Path(answer.open())
        reason = read_tail(errors, LAST_WORDS) or "its process ended without an error message"
    except KeyboardInterrupt as interrupt:
        failure_display.show_as(interrupt, f"KeyboardInterrupt: {_what_is_left(order, answer)}")
        raise
    finally:
        ours.close()
        if errors >= 0:
            os.close(errors)
    raise ResourceError(
        f"the run's host did not start: {reason}. notebook-launcher's doctor() shows the limits of this machine."
    )


def _what_is_left(order: HostOrder, answer: HostAnswer | None) -> str:
    """Return what an interrupt of the start has left, and how to come back to it."""
    is_session = order.call is None
    if answer is None or answer.error is not None:
        return f"the {'session' if is_session else 'run'} was given up before it began; nothing of it is left"
    run_id = Path(answer.value).name
    if is_session:
        return f'the session is open; attach_session("{order.plan.config.name or run_id}") reconnects to it'
    return f'{run_id} is still running; attach("{run_id}") reconnects to it'


# --------------------------------------------------------------------------------------------------------------------
# The start of a detached session: a kernel resolves the options, and starts a host that keeps the ranks.


def start_detached_session(config: LaunchConfig) -> AttachedSession:
    """Start ranks that outlive this kernel, and return the session.

    Raises:
        ConfigError: An option cannot work, or a session that lives has the name.
        ResourceError: The host or the ranks did not start.
    """
    setup, config = config.setup, detached_options(config)
    home = run_folders.find_home(config.runs_folder)
    assert home is not None
    check_name_is_free(home, config)
    plan = make_plan(config)
    folder = hand_over(HostOrder(plan=plan, surroundings=plan.setup(many_calls=True)))
    return AttachedSession(folder, setup=setup)
