"""The process group of a rank: up before the function starts, and no hindrance to one that makes its own.

A torchrun script calls `init_process_group(...)` and `destroy_process_group()` itself. Here the group
is up already, so a call that asks for the group that is up is accepted, and one that asks for another
(backend, timeout, options) replaces it. Every group of a run gets its own prefix in the store that the
supervisor hosts, since keys of a destroyed group would otherwise send ranks to sockets that are gone.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.messages import GroupState
from notebook_launcher.processes.sockets import hang_up, open_sockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.messages import Setup

__all__ = ["Rendezvous", "install", "torchrun_environment"]


def torchrun_environment(setup: Setup, rank: int) -> dict[str, str]:
    """Return the variables torchrun would set, so that anyone's code finds its place."""
    world_size = str(setup.num_processes)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(setup.master_port),
        "TORCHELASTIC_RUN_ID": setup.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # All ranks are on this machine: nothing listens beyond loopback.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


class Rendezvous:
    """Makes, accepts, replaces and leaves the default process group of one rank."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self._rank = rank
        self._world_size = setup.num_processes
        self._backend = setup.backend
        self._port = setup.master_port
        self._generation = -1
        self._num_groups = 0
        self._store: Any = None
        self._ours: Any = None
        self._made: list[Any] = []
        self._asked_backend: str | None = None
        self._sockets: set[str] = set()

    def join(self, generation: int) -> None:
        """Have the group of this generation up, making it anew if the one that is up is another."""
        from torch.distributed import distributed_c10d as c10d

        self.drop_destroyed()
        if generation != self._generation:
            self.leave()
            self._generation, self._num_groups = generation, 0
        if self._backend is not None and not c10d.is_initialized():
            self._make({"backend": self._backend})
            self._ours = c10d.GroupMember.WORLD

    def drop_destroyed(self) -> None:
        """Let go of the groups that the function has destroyed, so that peers that wait in them get an error."""
        from torch.distributed import distributed_c10d as c10d

        self._made = [group for group in self._made if group is c10d.GroupMember.WORLD]

    def state(self) -> GroupState:
        """Return whether the group is the one that `join` left up, and how far each group has come."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:
            return GroupState(is_kept=True, num_calls={})
        num_calls = {"": c10d._world.group_count}
        for group, name in c10d._world.pg_names.items():
            with contextlib.suppress(AttributeError, RuntimeError):  # A backend that does not count.
                num_calls[name] = group._get_sequence_number_for_group()
        return GroupState(is_kept=c10d.GroupMember.WORLD is self._ours, num_calls=num_calls)

    def leave(self) -> None:
        """Tear the default group down, if one is up; peers that wait in it get an error."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        self._ours = None
        self._made.clear()
        sockets, self._sockets = self._sockets, set()
        if c10d is None or not c10d.is_initialized():
            hang_up(sockets)
            return
        abort = getattr(c10d, "_abort_process_group", None)
        if abort is not None and "nccl" in c10d.get_backend():
            abort()
        else:
            c10d.destroy_process_group()
            # A DDP model that the function kept keeps the group's connections too, and its peers waiting.
            hang_up(sockets)

    def init_process_group(self, original: Callable[..., None], asked: dict[str, Any]) -> None:
        """Answer the function's own call of `init_process_group`."""
        from torch.distributed import distributed_c10d as c10d

        _check_for_gpus(asked.get("backend"), self._backend)
        if self._ours is not None and c10d.GroupMember.WORLD is self._ours:
            ours, self._ours = self._ours, None
            if self._asks_for_what_is_up(asked):
                # Accepted once: a second call is the mistake that torch says it is.
                return
            del ours
            self.leave()
        self._make(asked, original)

    def _asks_for_what_is_up(self, asked: dict[str, Any]) -> bool:
        from torch.distributed import distributed_c10d as c10d

        backend, timeout = asked.get("backend"), asked.get("timeout")
        usual_timeout = c10d._get_default_timeout(c10d.Backend(str(self._asked_backend)))
        return (
            (backend is None or str(backend).lower() == self._asked_backend)
            and (timeout is None or timeout == usual_timeout)
            and self._meets_here(asked)
            and all(asked.get(name) is None for name in ("store", "pg_options", "device_id", "_ranks"))
        )

    def _meets_here(self, asked: dict[str, Any]) -> bool:
        """Return whether all ranks of this run, and nobody else, are to meet: then the supervisor's store will do.

        That of a `tcp://` address would have no host: torchrun's variables make every rank a client.
        """
        return (
            asked.get("store") is None
            and str(asked.get("init_method") or "env://").startswith(("env://", "tcp://"))
            and asked.get("world_size", -1) in (-1, self._world_size)
            and asked.get("rank", -1) in (-1, self._rank)
        )

    def _make(self, asked: dict[str, Any], original: Callable[..., None] | None = None) -> None:
        from torch.distributed import distributed_c10d as c10d

        init = original or _original_init_process_group()
        if self._meets_here(asked):
            asked = {**asked, "store": self._next_store(asked.get("timeout")), "init_method": None}
            asked["rank"], asked["world_size"] = self._rank, self._world_size
        self._asked_backend = str(asked.get("backend")).lower()
        before = open_sockets()
        init(**asked)
        self._sockets |= open_sockets().keys() - before.keys()
        # Kept until the function has returned: a DDP model may outlive the group that the function destroys.
        # Were its reference the last one, it would wait, with the GIL, for the group's threads to end, and one
        # of them may be waiting for the GIL (torch 2.13). Letting go of this one releases the GIL.
        self._made.append(c10d.GroupMember.WORLD)

    def _next_store(self, timeout: Any) -> Any:
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.constants import default_pg_timeout

        if self._store is None:
            self._store = TCPStore("127.0.0.1", self._port, self._world_size, is_master=False)
        self._store.set_timeout(timeout or default_pg_timeout)
        self._num_groups += 1
        return PrefixStore(f"generation-{self._generation}/group-{self._num_groups}", self._store)


def _check_for_gpus(asked: Any, ours: str | None) -> None:
    import torch

    if "nccl" in str(asked).lower() and not torch.cuda.is_available():
        up = f"A {ours} group of all ranks is up already" if ours else "There is no group either"
        raise RuntimeError(
            f"init_process_group(backend={str(asked)!r}): NCCL needs a GPU for each rank, and this rank sees none. "
            f'{up}: leave the call out, or write init_process_group("gloo").'
        )


# The one place where torch itself is changed, in ranks and in the fork server, never in the kernel.


def install() -> None:
    """Replace `torch.distributed.init_process_group`, wherever torch refers to it, by one that asks the rank."""
    # Its functions keep the group that is up when it is imported, as defaults. DDP imports it by way of the
    # compiler; a group that lives on there keeps its connections, and peers wait for a rank that has left.
    import torch.distributed.nn.functional  # noqa: F401

    original = _original_init_process_group()
    replacement = _replacement(original)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and getattr(module, "init_process_group", None) is original:
            module.init_process_group = replacement  # type: ignore[attr-defined]


def redirect_globals(function: Any) -> None:
    """Do the same in the globals of a function that a fork of the kernel brought along."""
    from torch.distributed import init_process_group

    namespace = getattr(inspect.unwrap(function), "__globals__", None) if callable(function) else None
    original = _original_init_process_group()
    for name, value in list((namespace or {}).items()):
        if value is original:
            namespace[name] = init_process_group  # type: ignore[index]


def _original_init_process_group() -> Callable[..., None]:
    from torch.distributed import distributed_c10d

    function = distributed_c10d.init_process_group
    return getattr(function, "notebook_launcher_original", function)


def _replacement(original: Callable[..., None]) -> Callable[..., None]:
    import functools

    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        from notebook_launcher import context

        rank = context.current()
        # A data-loader worker or another child of a rank is not that rank.
        if rank is None or rank.pid != os.getpid():
            original(*args, **kwargs)
        else:
            rank.rendezvous.init_process_group(original, dict(signature.bind(*args, **kwargs).arguments))

    init_process_group.notebook_launcher_original = original  # type: ignore[attr-defined]
    return init_process_group
