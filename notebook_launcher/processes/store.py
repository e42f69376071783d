"""The server of the rendezvous store, a thread of the supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = ["host_store"]


def host_store(setup: messages.Setup, listen_fd: int) -> Any:
    """Return the server of the store at a socket that listens; it ends with the last reference to it."""
    # `wait_for_workers=False`: the constructor must not block; ranks come when they are ready.
    import torch
    from torch.distributed import TCPStore

    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
    address = (setup.place.store_address, setup.master_port, setup.num_processes)
    # Before torch 2.8 the libuv server cannot take over a socket that listens, and logs an error if it is asked to
    # (pytorch#150215).
    libuv = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
    return TCPStore(*address, **options, use_libuv=libuv)
