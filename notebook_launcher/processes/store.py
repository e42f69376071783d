"""The rendezvous store: its socket, and its server, which is a thread of the supervisor."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = ["bind_and_listen", "host_store"]

MIN_BACKLOG = 128
"""Connections that wait at the socket at least, until the server runs; the system allows 4,096."""


def bind_and_listen(place: messages.Place, num_processes: int, sock: socket.socket | None = None) -> socket.socket:
    """Return a socket at which the store of all ranks is to listen, and which listens already.

    Args:
        place: Its `store_address` is the address.
        num_processes: The number of all ranks, which may connect at once.
        sock: A socket that is bound already, perhaps; None: a new one.
    """
    sock = sock or socket.socket()
    if not sock.getsockname()[1]:
        sock.bind((place.store_address, 0))
    sock.listen(max(MIN_BACKLOG, num_processes))
    return sock


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
