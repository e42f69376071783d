"""The time limit of a process group that is up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime as dt

__all__ = ["set_group_timeout"]


def set_group_timeout(timeout: dt.timedelta) -> None:
    """Set the longest wait of the default group's collectives; raise AttributeError if this torch cannot do so."""
    from torch.distributed import distributed_c10d as c10d

    # torch 2.15 has a public name for it, and warns of the old one.
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # noqa: SLF001
    set_timeout(timeout)
