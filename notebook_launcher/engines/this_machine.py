"""The engine of a launch that names none: the ranks are processes of the kernel's own machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from notebook_launcher.engines.process_tree import ProcessTree
from notebook_launcher.engines.starting import fork_server, fork_starter, start_by_spawn

if TYPE_CHECKING:
    from notebook_launcher import messages
    from notebook_launcher.engines.starting import Starter
    from notebook_launcher.travel import FunctionCall

__all__ = ["start_here", "warm_up"]


def start_here(setup: messages.Setup, call: FunctionCall | None = None) -> ProcessTree:
    """Start ranks on this machine; raises `ResourceError` if it cannot hold them.

    Args:
        setup: The settings of all ranks.
        call: The first call, which ranks inherit that are forked from this process.
    """
    return ProcessTree(setup, _starter(setup, call))


def _starter(setup: messages.Setup, call: FunctionCall | None) -> Starter:
    if setup.start_method == "fork":
        assert call is not None
        return fork_starter(call)
    if setup.start_method == "spawn":
        return start_by_spawn
    return fork_server().starter(setup.environ)


def warm_up() -> None:
    """Start the fork server, unless it is up; returns before it is ready."""
    fork_server().start(os.environ)
