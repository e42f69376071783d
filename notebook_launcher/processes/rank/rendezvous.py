"""The process group of a rank, initialized before the function starts; the function may still make its own.

A torchrun script calls `init_process_group(...)` and `destroy_process_group()` itself. In a rank the group is
already initialized. A call that asks for the same group is therefore accepted, and a call that asks for another
one (backend, timeout, options) replaces the group. Every group of a run gets a prefix of its own in the store that
the supervisor hosts, because keys of a destroyed group would send ranks to sockets that are closed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import inspect
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging.messages import GroupState
from notebook_launcher.processes.libraries import TENSORS_IN_HUGE_PAGES
from notebook_launcher.torch_lines import without_gloo_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.messaging.messages import Setup


NCCL_DEFAULTS = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Set in ranks with GPUs unless the user has. After a device-side assert every CUDA call of the process fails, even
calls of NCCL's watchdog thread, which would end the process (SIGABRT) before Python could report the error."""

STILL_DISPLAYS = {"TTY_INTERACTIVE": "0"}
"""Set in ranks unless the user has: rich (14.1 and later) then writes a table or bar that moves once, at its end. In a
notebook, FORCE_COLOR is set, and rich would take a rank's pipe for a terminal and move its cursor up, which lines of
several ranks cannot follow."""

CONNECTED = "connected-{}"
"""Key by which a rank reports in the store that it is connected."""
PATIENCE = dt.timedelta(seconds=10)
"""Time for which a rank that replaces the group waits until its peers are connected in it."""
GIL_WAIT = 0.02
"""Seconds in which the threads of a group that was destroyed may have the GIL, before the group is dropped."""
WATCHDOG_KEY = "exception_dump"
"""Key that a watchdog of NCCL sets when it gives up. It has no group's prefix, so the monitors of a later group find it
and would end their processes."""


def torchrun_environment(setup: Setup, rank: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set, and the node's number by its name elsewhere."""
    world_size, place = str(setup.num_processes), setup.place
    defaults = {**TENSORS_IN_HUGE_PAGES, **STILL_DISPLAYS, **(NCCL_DEFAULTS if setup.use_gpu else {})}
    return {
        **_own_slice(setup, place.local_rank(rank)),
        **{name: value for name, value in defaults.items() if name not in setup.environ},
        "RANK": str(rank),
        "LOCAL_RANK": str(place.local_rank(rank)),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(len(place.ranks)),
        "GROUP_RANK": str(place.node),
        "NODE_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": place.store_address,
        "MASTER_PORT": str(setup.master_port),
        "TORCHELASTIC_RUN_ID": setup.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # If all ranks are on this machine, the groups' sockets listen on the loopback interface only.
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": place.interface,
    }


def _own_slice(setup: Setup, local_rank: int) -> dict[str, str]:
    """Return what shows a rank its slice of a partitioned GPU (MIG): a process can use one slice, its first."""
    visible = setup.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not (setup.use_gpu and visible.startswith("MIG-")):
        return {}
    slices = visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": slices[local_rank % len(slices)]}


class Rendezvous:
    """Makes, accepts, replaces and leaves the default process group of one rank."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self._rank = rank
        self._world_size = setup.num_processes
        self._backend = setup.backend
        """The backend of the group that `join` makes; None: `join` makes no group."""
        self._address = (setup.place.store_address, setup.master_port)
        self._generation = -1
        """Number of the present group among the groups that `join` has made."""
        self._num_groups = 0
        """Number of groups that were made in this generation, the function's own included."""
        self._store: Any = None
        """The client of the supervisor's store; None until it is first needed."""
        self._ours: Any = None
        """The group that `join` made; None once the function has called `init_process_group`, or the rank has left."""
        self._meeting: Any = None
        """The part of the store in which the ranks of that group report that they are connected."""
        self._made: list[Any] = []
        """Groups that must live until the function has returned; see `_make`."""
        self._asked_backend: str | None = None
        """The backend that the present group was asked for with."""
        self._sockets: set[str] = set()
        """The connections of the present group, and of the groups that were made within it."""

    def join(self, generation: int) -> None:
        """Make the group of this generation, unless the rank has it already."""
        from torch.distributed import distributed_c10d as c10d

        self.drop_destroyed()
        if generation != self._generation:
            self.leave()
            self._generation, self._num_groups = generation, 0
        if self._backend is not None and not c10d.is_initialized():
            self._meeting = self._make({"backend": self._backend})
            self._meeting.set(CONNECTED.format(self._rank), "1")
            self._ours = c10d.GroupMember.WORLD

    def drop_destroyed(self) -> None:
        """Release the groups that the function has destroyed, so that peers that wait in them get an error."""
        from torch.distributed import distributed_c10d as c10d

        made = [group for group in self._made if group is c10d.GroupMember.WORLD]
        if len(made) < len(self._made):
            # torch 2.6 holds the GIL here while it waits for the group's threads. One that has just carried out a
            # collective needs the GIL to drop its tensors.
            time.sleep(GIL_WAIT)
        self._made = made

    def state(self) -> GroupState:
        """Return the state of the group: if it is still the one that `join` made, and the collectives of each group."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:
            return GroupState(is_kept=True, num_calls={})
        num_calls = {"": c10d._world.group_count}
        for group, name in c10d._world.pg_names.items():
            with contextlib.suppress(AttributeError, RuntimeError):  # This backend does not count collectives.
                num_calls[name] = group._get_sequence_number_for_group()
        return GroupState(is_kept=c10d.GroupMember.WORLD is self._ours, num_calls=num_calls)

    @contextlib.contextmanager
    def noting_sockets(self) -> Iterator[None]:
        """Note the connections that a new group opens inside this block, whose lines on them are left out."""
        before = open_sockets()
        with without_gloo_lines():
            yield
        self._sockets |= open_sockets().keys() - before.keys()

    def hang_up(self) -> None:
        """End the group's connections, so that peers that wait in it get an error; its rank and size stay readable.

        With NCCL the group is left, because its communicators are not ended by a closed connection.
        """
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None or not c10d.is_initialized() or "nccl" in c10d.get_backend():
            self.leave()
        else:
            hang_up(self._sockets)

    def leave(self) -> None:
        """Shut down the default group and those within it; peers that wait in one of them get an error."""
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
            # A model or variable that holds a group would keep its connections open, and peers would wait on.
            hang_up(sockets)

    def init_process_group(self, original: Callable[..., None], asked: dict[str, Any]) -> None:
        """Carry out the function's own call of `init_process_group`."""
        from torch.distributed import distributed_c10d as c10d

        _check_for_gpus(asked.get("backend"), self._backend)
        if self._ours is not None and c10d.GroupMember.WORLD is self._ours:
            ours, self._ours = self._ours, None
            if self._asks_for_what_is_up(asked):
                # A call is accepted once. A second one is a mistake, for which torch raises its own error.
                return
            del ours
            # A rank that still connects would fail if this rank left.
            with contextlib.suppress(RuntimeError):  # A rank has died.
                self._meeting.wait([CONNECTED.format(rank) for rank in range(self._world_size)], PATIENCE)
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
        """Return True if the group is to have all ranks of this run and no others, so that our store can be used.

        A store at a `tcp://` address would have no host, because torchrun's variables make every rank a client.
        """
        return (
            asked.get("store") is None
            and str(asked.get("init_method") or "env://").startswith(("env://", "tcp://"))
            and asked.get("world_size", -1) in (-1, self._world_size)
            and asked.get("rank", -1) in (-1, self._rank)
        )

    def _make(self, asked: dict[str, Any], original: Callable[..., None] | None = None) -> Any:
        """Make the default group; return its store."""
        from torch.distributed import distributed_c10d as c10d

        init = original or original_of("init_process_group")
        if self._meets_here(asked):
            asked = {**asked, "store": self._next_store(asked.get("timeout")), "init_method": None}
            asked["rank"], asked["world_size"] = self._rank, self._world_size
        self._asked_backend = str(asked.get("backend")).lower()
        with self.noting_sockets():
            init(**asked)
        # A reference is kept until the function has returned, because a DDP model may outlive the group that the
        # function destroys. If the model's reference were the last one, dropping it would wait, holding the GIL, for
        # the group's threads, one of which may wait for the GIL (torch 2.13). Dropping this reference releases the GIL.
        self._made.append(c10d.GroupMember.WORLD)
        return asked.get("store")

    @property
    def store(self) -> Any:
        """The client of the supervisor's store."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore(*self._address, self._world_size, is_master=False)
        return self._store

    def _next_store(self, timeout: Any) -> Any:
        from torch.distributed import PrefixStore
        from torch.distributed.constants import default_pg_timeout

        store = self.store
        store.set_timeout(timeout or default_pg_timeout)
        if self._generation > 0:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(WATCHDOG_KEY)
        self._num_groups += 1
        return PrefixStore(f"generation-{self._generation}/group-{self._num_groups}", store)


def _check_for_gpus(asked: Any, ours: str | None) -> None:
    import torch

    if "nccl" in str(asked).lower() and not torch.cuda.is_available():
        up = f"A {ours} group of all ranks is up already" if ours else "There is no group either"
        raise RuntimeError(
            f"init_process_group(backend={str(asked)!r}): NCCL needs a GPU for each rank, and this rank sees none. "
            f'{up}: leave the call out, or write init_process_group("gloo").'
        )


# --------------------------------------------------------------------------------------------------------------------
# Replaces torch's functions that make process groups by functions that ask the rank, and a log of DDP that crashes.
#
# The only place that changes torch itself: in ranks and in the fork server, never in the kernel.


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


# --------------------------------------------------------------------------------------------------------------------
# Lists the sockets that a piece of code opens, and shuts their connections down.


DESCRIPTORS = Path("/proc/self/fd")


def open_sockets() -> dict[str, int]:
    """Return this process's sockets: `socket:[inode]`, which no other socket has, and a descriptor."""
    found: dict[str, int] = {}
    for descriptor in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # The descriptor that listed the folder is closed by now.
            target = str(descriptor.readlink())
            if target.startswith("socket:"):
                found[target] = int(descriptor.name)
    return found


def hang_up(sockets: set[str]) -> None:
    """Shut down the connections that are still open, so that their readers see the end of file."""
    for target, fd in open_sockets().items():
        if target in sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
                if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    end.shutdown(socket.SHUT_RDWR)
