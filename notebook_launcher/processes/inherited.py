"""What a forked process inherits from its parent and must let go of."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import weakref
from typing import Any

__all__ = ["finish_multiprocessing", "forget", "move_log_handlers"]


def forget(start_method: str) -> None:
    """Drop the parent's children and exit handlers and, of the kernel, its process groups."""
    if start_method == "spawn":
        return
    _forget_children()
    _forget_exit_handlers()
    if start_method == "fork":  # The fork server ran nothing of the user's.
        _forget_process_groups()
        _forget_being_alone()


def _forget_exit_handlers() -> None:
    # The user's are for the kernel to run. torch's, of the fork server, take 45 ms: one imports a module to
    # describe what was compiled, 170 others take operators apart that end with the process. The standard
    # library registers its own once per process, at an import or a first use that is past.
    atexit._clear()
    atexit.register(logging.shutdown)
    # A copy of the kernel's TemporaryDirectory must not remove its folder. The entries are kept: what
    # they hold may do something when it is freed.
    finalize: Any = weakref.finalize
    _Kept.finalizers = dict(finalize._registry)
    finalize._registry.clear()
    finalize._registered_with_atexit = False


def _forget_children() -> None:
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process._children = set()  # type: ignore[attr-defined]
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()


def _forget_process_groups() -> None:
    # Destroying them would wait for threads that the fork did not bring along. They are kept alive
    # for the same reason, and torch is told to start anew.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    _Kept.groups = (c10d._world, list(c10d._world.pg_map))
    c10d._update_default_pg(None)
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(c10d._world, name).clear()
    c10d._unregister_all_process_groups()
    c10d._world.group_count = 0


def _forget_being_alone() -> None:
    # What Hugging Face's Accelerator found in the kernel it keeps in these classes: one process. A rank
    # that believed it would train for itself, and nothing would say so.
    if (state := sys.modules.get("accelerate.state")) is not None:
        for name in ("AcceleratorState", "GradientState", "PartialState"):
            getattr(state, name)._shared_state.clear()
    # Lightning noted at its import that the kernel is interactive, where it refuses to use ranks.
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning") and "_IS_INTERACTIVE" in vars(module):
            module._IS_INTERACTIVE = False  # type: ignore[attr-defined]


class _Kept:
    finalizers: Any = None
    groups: Any = None


def move_log_handlers(streams: dict[int, Any]) -> None:
    """Point logging handlers at the new stream that stands for the old one with this `id`."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            new = streams.get(id(getattr(handler, "stream", None)))
            if new is not None:
                handler.stream = new


def finish_multiprocessing() -> None:
    """Do what `multiprocessing` does at the end of a process: end workers, flush queues."""
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        with contextlib.suppress(Exception):
            util._exit_function()
