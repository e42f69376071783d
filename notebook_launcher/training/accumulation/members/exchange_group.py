"""The process group in which gradients are exchanged beside a forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

__all__ = ["exchange_group"]

_GROUPS: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The group for exchanges beside each default process group. It keeps sockets open, and it is unknown when a model is
out of use; so all models of a process share it."""


def exchange_group() -> dist.ProcessGroup:
    """Return a group of all ranks for exchanges alone; at first, every rank must call this."""
    world = dist.group.WORLD
    if world not in _GROUPS:
        made: Any = dist.new_group(backend="gloo", group_desc="exchange of gradients")
        _GROUPS[world] = made
    return _GROUPS[world]
