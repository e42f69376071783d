"""The process among its peers: its rank, its device, and work that only some processes do."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher import context
from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.torch_lines import set_group_timeout
from notebook_launcher.training.plugins import DistributedType
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.process.environment import ProcessPlace, flag, read_place
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import describe_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from notebook_launcher.training.parallelism.deepspeed import DeepSpeedPlugin
    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_launcher.training.parallelism.mesh import ParallelismConfig


class ProcessState:
    """This process among its peers: rank, device, process group.

    It adopts the default process group that is up (`notebook_launch` starts one), or else starts the one that
    torchrun's variables describe: with NCCL if every process of this machine has a GPU of its own, else with
    gloo. Without those variables the process is alone, and nothing here waits for anybody.

    Args:
        cpu: Use no GPU, as with the variable `ACCELERATE_USE_CPU`. The variable
            `ACCELERATE_TORCH_DEVICE` names the device, and wins.
        backend: The group's backend; None: as above. Only for a group that is started here.
        timeout: Longest wait of a collective before it is an error; None: torch's 30 minutes with gloo and 10
            with NCCL. A group that is up already gets it too, and keeps it.

    Raises:
        ConfigError: `WORLD_SIZE` is more than 1, and the other variables do not name the place where the
            processes meet.
    """

    device: torch.device
    """The device that this process computes on."""
    num_processes: int
    """Processes that train together."""
    process_index: int
    """The rank of this process."""
    local_process_index: int
    """The number of this process on its machine."""
    distributed_type: DistributedType
    backend: str | None
    """The group's backend; None without one."""

    def __init__(self, *, cpu: bool = False, backend: str | None = None, timeout: timedelta | None = None) -> None:
        named = os.environ.get("ACCELERATE_TORCH_DEVICE")
        self._named_device = torch.device(named) if named else None
        wants_cpu = cpu or flag(os.environ, "ACCELERATE_USE_CPU")
        wants_gpu = not wants_cpu if self._named_device is None else self._named_device.type == "cuda"
        self._use_gpu = wants_gpu and torch.cuda.is_available()
        # A shorter timeout of the group counts from the start, not after the wait for a notice.
        self._patience = math.inf if timeout is None else timeout.total_seconds() / 2
        place = None
        if dist.is_available():
            place = _place_in_group(backend, timeout) if dist.is_initialized() else read_place(os.environ)
        self.process_index = place.rank if place else 0
        self.local_process_index = place.local_rank if place else 0
        self.num_processes = place.num_processes if place else 1
        self.set_device()
        if place and not dist.is_initialized():
            # NCCL refuses two processes of one group on one GPU.
            has_own_gpu = self._use_gpu and (place.num_local or 1) <= torch.cuda.device_count()
            chosen = backend or ("nccl" if has_own_gpu and dist.is_nccl_available() else "gloo")
            dist.init_process_group(chosen, timeout=timeout, device_id=self.device if chosen == "nccl" else None)
        self.backend = dist.get_backend() if place else None
        several = DistributedType.MULTI_GPU if self._use_gpu else DistributedType.MULTI_CPU
        self.distributed_type = several if self.num_processes > 1 else DistributedType.NO

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            # With !s, because Python 3.10 formats a member of a text enumeration as its value.
            f"Distributed environment: {self.distributed_type!s}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def set_device(self) -> None:
        """Choose the device, and make this process' GPU torch's current one."""
        named = self._named_device
        if named is not None and (named.type != "cuda" or named.index is not None):
            self.device = named
            if self._use_gpu:
                torch.cuda.set_device(named)
        elif not self._use_gpu:
            self.device = torch.device("cpu")
        elif self.num_processes == 1:
            # `torch.cuda.current_device()` would initialise CUDA, and callers that only need the rank should not pay.
            started = torch.cuda.is_initialized()
            self.device = torch.device("cuda", torch.cuda.current_device() if started else 0)
        else:
            self.device = torch.device("cuda", self.local_process_index % torch.cuda.device_count())
            torch.cuda.set_device(self.device)

    @property
    def debug(self) -> bool:
        """The variable `ACCELERATE_DEBUG_MODE`. Here, collectives compare names, dtypes and shapes always."""
        return flag(os.environ, "ACCELERATE_DEBUG_MODE")

    @debug.setter
    def debug(self, debug: bool) -> None:
        os.environ["ACCELERATE_DEBUG_MODE"] = str(bool(debug)).lower()

    @property
    def default_device(self) -> torch.device:
        """The device of a process that chose none: a GPU if the machine has one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def initialized(self) -> bool:
        """True, for code that asks Accelerate's shared state."""
        return True

    @property
    def use_distributed(self) -> bool:
        """True if several processes train together."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """True on process 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first process of each machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the process with the highest rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here. All of them must call it.

        A process that has waited 10 s prints one line with the absent ranks, and continues to wait.
        """
        if self.num_processes > 1:
            meet("wait_for_everyone", self._patience)
        self._barrier(wait=True)

    def _barrier(self, *, wait: bool) -> None:
        if self.num_processes == 1:
            return
        device_ids = [self.device.index] if self.backend == "nccl" and self.device.type == "cuda" else None
        with context.activity(context.WAITING if wait else context.COMPUTING):
            dist.barrier(device_ids=device_ids, async_op=not wait)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let process 0 run a `with` block while the others wait, and then the others.

        If process 0 raises in it, the others run the block all the same.
        """
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let the first process of each machine run a `with` block while the others wait, and then the others."""
        return self._goes_first(self.is_local_main_process)

    @contextlib.contextmanager
    def _goes_first(self, first: bool) -> Iterator[None]:  # its only argument
        if not first:
            self._barrier(wait=True)  # for as long as the first one works
            yield
            return
        try:
            yield
        except Exception:
            # Lets the others in without waiting for them: what went wrong must be seen at once.
            with contextlib.suppress(RuntimeError):
                self._barrier(wait=False)
            raise
        self._barrier(wait=True)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make a function do nothing, and return None, on all processes but process 0."""
        return self._only(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make a function do nothing on all processes but the first of each machine."""
        return self._only(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make a function do nothing on all processes but the last."""
        return self._only(self.is_last_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make a function do nothing on all processes but process `process_index`; a lone process runs it.

        Raises:
            ValueError: `process_index` is missing, or no whole number from 0 on.
        """
        return self._only(self.process_index == _given("process_index", process_index), function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make a function do nothing on all processes but number `local_process_index` of each machine.

        Raises:
            ValueError: `local_process_index` is missing, or no whole number from 0 on.
        """
        return self._only(self.local_process_index == _given("local_process_index", local_process_index), function)

    def _only(self, here: bool, function: Callable[..., Any] | None) -> Callable[..., Any]:
        if function is None:
            return functools.partial(self._only, here)
        if here or not self.use_distributed:
            return function

        @functools.wraps(function)
        def do_nothing(*_args: Any, **_kwargs: Any) -> None:
            return None

        return do_nothing

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of `inputs`, for inference for instance.

        Args:
            inputs: A sequence, tensor, array, data frame, data set, or a mapping of these, equally long.
            apply_padding: True if the last item is repeated until all shares are equally long, so that
                results can be gathered.

        Yields:
            The share, a piece of `inputs` without gaps; the first processes get one item more where the
            number of items is not divisible. A lone process gets `inputs` itself.

        Raises:
            ValueError: The values of a mapping differ in length.
            TypeError: `inputs` cannot be split.
        """
        if not self.use_distributed:
            yield inputs
        else:
            yield split(inputs, self.process_index, self.num_processes, pad=apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on the first process of each machine only."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - the purpose of this method

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave `group`, or the default group and all others; nothing happens if none is up."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group(group)


def wait_for_everyone() -> None:
    """Wait until every process has come here; see `ProcessState.wait_for_everyone`."""
    ProcessState().wait_for_everyone()


def _place_in_group(backend: str | None, timeout: timedelta | None) -> ProcessPlace:
    """Return this process' place in the group that is up."""
    up = dist.get_backend()
    if backend is not None and backend != up:
        warn_user(
            f"backend={backend!r} has no effect: the process group that is up uses {up!r}, and is kept. Choose "
            f"another where the group is created: notebook_launch(..., backend={backend!r}) or "
            "init_process_group(...)."
        )
    if timeout is not None:
        set_group_timeout(timeout)
    local_rank = os.environ.get("LOCAL_RANK") or dist.get_rank()
    return ProcessPlace(
        rank=dist.get_rank(), num_processes=dist.get_world_size(), local_rank=int(local_rank), num_local=None
    )


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{name} is missing: name the process, as in @accelerator.on_process({name}=1).")
    return whole_number(name, value, minimum=0)


# --------------------------------------------------------------------------------------------------------------------
# The process state of an Accelerator, with the precision it settled on.


class AcceleratorState(ProcessState):
    """A `ProcessState` that also knows the precision."""

    def __init__(self, *, mixed_precision: str = "no", **options: Any) -> None:
        super().__init__(**options)
        self._mixed_precision = mixed_precision
        self.is_fsdp2 = False
        self.deepspeed_plugin: DeepSpeedPlugin | None = None
        self.fsdp_plugin: FullyShardedDataParallelPlugin | None = None
        self.parallelism_config: ParallelismConfig | None = None
        self.megatron_lm_plugin = None

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"` or `"bf16"`."""
        return self._mixed_precision

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self._mixed_precision}\n"


# --------------------------------------------------------------------------------------------------------------------
# One process' share of a collection: the pieces are contiguous, and the first ones get one item more.


def split(inputs: Any, process_index: int, num_processes: int, *, pad: bool = False) -> Any:
    """Return the share of one process, as `ProcessState.split_between_processes` gives it."""
    length = _length(inputs)
    share, extras = divmod(length, num_processes)
    start = process_index * share + min(process_index, extras)
    size = share + (process_index < extras)
    missing = share + (extras > 0) - size if pad and length else 0
    return _take(inputs, start, size, [length - 1] * missing)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        sequence = isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes))
        array = hasattr(inputs, "shape") and hasattr(inputs, "__getitem__") and len(inputs.shape) > 0
        if not (sequence or array or _is_dataset(inputs)):
            raise TypeError(
                f"split_between_processes got {describe_value(inputs)}, a {type(inputs).__name__}, which has no items "
                "to share out. It takes a list, tuple, tensor, array or data set, or a dict of them."
            )
        return len(inputs)
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
        raise ValueError(
            f"split_between_processes got a mapping whose values differ in length ({listed}). Each process gets the "
            "same piece of every value, so they must be equally long."
        )
    return next(iter(lengths.values()), 0)


def _take(inputs: Any, start: int, size: int, more: list[int]) -> Any:
    """Return the items from `start` on, and the items with the numbers `more`."""
    if isinstance(inputs, Mapping):
        return {key: _take(value, start, size, more) for key, value in inputs.items()}
    if _is_dataset(inputs):
        return inputs.select([*range(start, start + size), *more])
    items = getattr(inputs, "iloc", inputs)
    if not isinstance(inputs, Sequence):
        return items[[*range(start, start + size), *more]] if more else items[start : start + size]
    taken = [inputs[at] for at in (*range(start, start + size), *more)]
    return tuple(taken) if isinstance(inputs, tuple) else taken


def _is_dataset(inputs: Any) -> bool:
    # Slicing a datasets.Dataset gives a dict of columns, and `select` a data set.
    return hasattr(inputs, "select") and hasattr(inputs, "column_names")
