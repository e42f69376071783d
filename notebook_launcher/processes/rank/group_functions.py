"""Replaces torch's functions that make process groups by functions that ask the rank, and a log of DDP that crashes.

The only place that changes torch itself: in ranks and in the fork server, never in the kernel.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.processes.rank.rendezvous import Rendezvous

__all__ = ["original_of", "redirect_globals", "replace_group_functions"]

MARK = "notebook_launcher_original"
"""Attribute of a replacement that holds torch's function."""


def replace_group_functions() -> None:
    """Replace `init_process_group` and `new_group`, wherever torch refers to them."""
    # Imported now, before there is a group: as defaults, the module's functions keep the group of the time of the
    # import. DDP imports the module through the compiler. A group that is kept there keeps its connections open, and
    # peers would wait for a rank that has left.
    import torch.distributed.nn.functional  # noqa: F401

    for original, replacement in _replacements():
        name = original.__name__
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("torch.distributed") and getattr(module, name, None) is original:
                setattr(module, name, replacement)
    _leave_out_log()


def _leave_out_log() -> None:
    """Let DDP log nothing about its construction while collectives are compared.

    With `TORCH_DISTRIBUTED_DEBUG=DETAIL` each group is wrapped, and torch 2.13 takes the wrapper for the gloo group
    inside it when it logs the group's devices: every `DistributedDataParallel` on gloo ended in a segmentation fault.
    """
    import torch.distributed as dist

    logger: Any = dist.Logger
    log = logger.set_construction_data_and_log
    if hasattr(log, MARK):
        return

    @functools.wraps(log)
    def log_unless_wrapped(self: Any, *args: Any) -> None:
        if dist.get_debug_level() != dist.DebugLevel.DETAIL:
            log(self, *args)

    setattr(log_unless_wrapped, MARK, log)
    logger.set_construction_data_and_log = log_unless_wrapped


def redirect_globals(function: Any) -> None:
    """Replace these functions in the globals of a function that this process inherited from the kernel."""
    import torch.distributed as dist

    namespace = getattr(inspect.unwrap(function), "__globals__", None) if callable(function) else None
    for replaced in ("init_process_group", "new_group"):
        original = original_of(replaced)
        for name, value in list((namespace or {}).items()):
            if value is original:
                namespace[name] = getattr(dist, replaced)  # type: ignore[index]


def original_of(name: str) -> Callable[..., Any]:
    """Return torch's own function of this name."""
    from torch.distributed import distributed_c10d

    function = getattr(distributed_c10d, name)
    original: Callable[..., Any] = getattr(function, MARK, function)
    return original


def _replacements() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    init_process_group, new_group = original_of("init_process_group"), original_of("new_group")
    signature = inspect.signature(init_process_group)

    @functools.wraps(init_process_group)
    def init_through_rank(*args: Any, **kwargs: Any) -> None:
        if (rendezvous := _rendezvous()) is None:
            init_process_group(*args, **kwargs)
        else:
            rendezvous.init_process_group(init_process_group, dict(signature.bind(*args, **kwargs).arguments))

    @functools.wraps(new_group)
    def make_in_rank(*args: Any, **kwargs: Any) -> Any:
        if (rendezvous := _rendezvous()) is None:
            return new_group(*args, **kwargs)
        with rendezvous.noting_sockets():
            return new_group(*args, **kwargs)

    setattr(init_through_rank, MARK, init_process_group)
    setattr(make_in_rank, MARK, new_group)
    return [(init_process_group, init_through_rank), (new_group, make_in_rank)]


def _rendezvous() -> Rendezvous | None:
    """Return the process group of the rank that this process is; None in any other process."""
    from notebook_launcher.context import current

    context = current()
    # A data-loader worker or another child process of a rank is not the rank.
    return None if context is None or context.pid != os.getpid() else context.rendezvous
