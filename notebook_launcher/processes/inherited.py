"""Removes things that a forked process inherits from its parent and must not use."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import weakref
from typing import Any


def forget_parent(start_method: str) -> None:
    """Drop the parent's children and, of the kernel, its exit handlers and process groups."""
    if start_method == "spawn":
        return
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        vars(process)["_children"] = set()
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
    if start_method == "fork":  # The fork server ran nothing of the user's, and has dropped its own exit handlers.
        forget_exit_handlers()
        _forget_process_groups()
        _forget_being_alone()


def forget_exit_handlers() -> None:
    """Drop the exit handlers of this process, which does not run them, or of its parent, which does."""
    # The kernel runs the user's handlers. torch's handlers in the fork server take 45 ms: one imports a module to
    # describe what was compiled, 170 others release operators that end with the process anyway. The standard library
    # registers its handlers once per process, at an import or first use that is past.
    atexit._clear()
    atexit.register(logging.shutdown)
    # A copy of the kernel's TemporaryDirectory must not remove the folder. The entries are kept alive, because the
    # objects that they hold may do something when they are freed.
    finalize: Any = weakref.finalize
    _KeptAlive.finalizers = (_KeptAlive.finalizers, dict(finalize._registry))
    finalize._registry.clear()
    finalize._registered_with_atexit = False


def _forget_process_groups() -> None:
    # Destroying the groups would wait for threads that do not exist in the fork. The groups are kept alive for the
    # same reason, and torch's registry is emptied.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    _KeptAlive.groups = (c10d._world, list(c10d._world.pg_map))
    c10d._update_default_pg(None)
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(c10d._world, name).clear()
    c10d._unregister_all_process_groups()
    c10d._world.group_count = 0


def _forget_being_alone() -> None:
    # Hugging Face's Accelerator stores in these classes that the kernel is a single process. A rank that found this
    # would train by itself, without any notice.
    if (state := sys.modules.get("accelerate.state")) is not None:
        for name in ("AcceleratorState", "GradientState", "PartialState"):
            getattr(state, name)._shared_state.clear()
    # At its import Lightning noted that the kernel is interactive, and would refuse to use ranks.
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning") and "_IS_INTERACTIVE" in vars(module):
            vars(module)["_IS_INTERACTIVE"] = False


class _KeptAlive:
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
