"""Changes to other libraries that start processes or process groups; a rank has both already.

`torch.multiprocessing.spawn`, with which programs start their own ranks, is refused.

Hugging Face Accelerate and Lightning Fabric pass `timeout=` to `init_process_group`, and skip that call if there is a
group already. In a rank, the existing group gets the timeout. Accelerate's barrier names the GPU with the number of the
rank, which does not exist if ranks share GPUs; then the barrier names no GPU. A version of these libraries without the
functions that are replaced here is left as it is.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.context import current
from notebook_launcher.errors import CallOrderError
from notebook_launcher.group_timeout import set_group_timeout
from notebook_launcher.processes.afterimport import after_import

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

__all__ = ["patch_when_imported", "with_existing_device"]


def patch_when_imported() -> None:
    """Make the changes, once the libraries are imported, in a rank or in a process from which ranks are forked."""
    fabric = {f"{package}.utilities.distributed": _patch_fabric for package in ("lightning_fabric", "lightning.fabric")}
    after_import({"accelerate.state": _patch_accelerate, "torch.multiprocessing": _patch_spawn, **fabric})


def _patch_spawn(module: types.ModuleType) -> None:
    for name in ("spawn", "start_processes"):
        function = _refusal(f"torch.multiprocessing.{name}", getattr(module, name))
        setattr(module, name, function)
        # `torch.multiprocessing.spawn` is a function, which hides the module of the same name.
        setattr(sys.modules["torch.multiprocessing.spawn"], name, function)


def _refusal(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement that raises `CallOrderError` in a rank, and calls the function in other processes."""

    @functools.wraps(function)
    def start(fn: Any, *args: Any, **kwargs: Any) -> Any:
        context = current()
        if context is None or context.pid != os.getpid():
            return function(fn, *args, **kwargs)
        own = getattr(fn, "__name__", "fn")
        raise CallOrderError(
            f"{name} was called in rank {context.rank}: the processes that it would start are up, started by the "
            f"launch. Call {own}(rank, ...) here, with the rank from torch.distributed.get_rank(); or launch {own} "
            "itself."
        )

    return start


def _patch_accelerate(module: types.ModuleType) -> None:
    state = getattr(module, "PartialState", None)
    if state is not None:
        state.__init__ = _with_timeout(state.__init__)
        if hasattr(state, "wait_for_everyone"):
            state.wait_for_everyone = with_existing_device(state.wait_for_everyone)


def with_existing_device(wait: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return Accelerate's barrier, which names a GPU by the rank's number, or a plain one where that GPU is missing."""

    @functools.wraps(wait)
    def wait_for_everyone(self: Any) -> None:
        import torch

        if torch.distributed.is_initialized() and self.local_process_index >= torch.cuda.device_count():
            torch.distributed.barrier()
        else:
            wait(self)

    return wait_for_everyone


def _patch_fabric(module: types.ModuleType) -> None:
    connect: Callable[..., Any] | None = getattr(module, "_init_dist_connection", None)
    if connect is None:
        return
    replacement = _with_timeout(connect)
    # The strategies have imported the function by its name, and a fork of the kernel may have inherited them.
    for name, other in list(sys.modules.items()):
        if "lightning" in name and vars(other).get("_init_dist_connection") is connect:
            other._init_dist_connection = replacement  # type: ignore[attr-defined]


def _with_timeout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which makes a group or finds one, so that a group that it finds gets its `timeout=`, too."""

    @functools.wraps(function)
    def connect(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed import distributed_c10d as c10d

        found = c10d.GroupMember.WORLD
        result = function(*args, **kwargs)
        timeout = kwargs.get("timeout")
        if found is not None and found is c10d.GroupMember.WORLD and isinstance(timeout, dt.timedelta):
            with contextlib.suppress(AttributeError):
                set_group_timeout(timeout)
        return result

    return connect
