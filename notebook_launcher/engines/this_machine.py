"""The engine of a launch that names none: the ranks are processes of the kernel's own machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from notebook_launcher.engines.fork_server_handle import fork_server, fork_starter, start_by_spawn
from notebook_launcher.engines.kernel_imports import modules_needed
from notebook_launcher.engines.process_tree import ProcessTree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.engines.fork_server_handle import Starter
    from notebook_launcher.messaging import messages
    from notebook_launcher.messaging.channel import Channel
    from notebook_launcher.travel import FunctionCall


def start_here(setup: messages.Setup, call: FunctionCall | None = None) -> ProcessTree:
    """Start ranks on this machine; raises `ResourceError` if it cannot hold them.

    Args:
        setup: The settings of all ranks.
        call: The first call: forked ranks inherit it, and the fork server learns from its code what to import first.
            None: it is not known yet, and all that the kernel has imported comes first.
    """
    return ProcessTree(setup, _starter(setup, call))


def _starter(setup: messages.Setup, call: FunctionCall | None) -> Starter:
    if setup.start_method == "fork":
        assert call is not None
        return fork_starter(call)
    if setup.start_method == "spawn":
        return start_by_spawn
    return fork_server().starter(setup, needs=_needs(call))


def _needs(call: FunctionCall | None) -> tuple[str, ...] | None:
    return None if call is None else modules_needed(call)


def warm_up() -> None:
    """Start the fork server, unless it is up; returns before it is ready."""
    fork_server().start(os.environ)


def start_host(module: str, host_fd: int, environ: Mapping[str, str], call: FunctionCall | None = None) -> int:
    """Fork the host of a detached run from the fork server; return a descriptor of its standard error.

    Args:
        module: Module whose `main` the host calls, with the descriptor and a fork server of its own.
        host_fd: Descriptor of the host's channel.
        environ: The host's environment.
        call: The call of the host's run; None for a session.

    Raises:
        ResourceError: The fork server did not start.
    """
    return fork_server().start_host(module, host_fd, environ, needs=_needs(call))


def take_over_server(channel: Channel, pid: int, environ: Mapping[str, str]) -> None:
    """Use a fork server that is a child of this process, and was started with this environment."""
    fork_server().take_over(channel, pid, environ)


def is_cold() -> bool:
    """Return True if the fork server has forked nothing yet: it may still be importing torch."""
    return fork_server().is_cold


def cool_down() -> None:
    """End the fork server, if there is one; idempotent."""
    fork_server().stop()
