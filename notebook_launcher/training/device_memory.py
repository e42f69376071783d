"""Device memory: releasing it, and running again with a smaller batch where it has run out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.training.operations import broadcast_object_list
from notebook_launcher.training.operations.collectives import world_size
from notebook_launcher.training.process.arrivals import Peers, clear_variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.training.accelerator import Accelerator

SHORTAGES = (
    "out of memory",  # CUDA, HIP, MPS, NCCL
    "can't allocate memory",  # torch's CPU allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error for a batch that no algorithm has the memory for
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the GPU memory that torch holds in reserve to the driver; without CUDA do nothing.

    Args:
        garbage_collection: True to collect reference cycles first, which takes tens of milliseconds.
    """
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Return a None for each object, to be assigned to the variables that hold it, and clear the cache.

    `model, optimizer = release_memory(model, optimizer)`. What other variables refer to stays.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return True for an error of a GPU or machine with too little memory."""
    if isinstance(exception, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(words in str(exception) for words in SHORTAGES)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    accelerator: Accelerator | None = None,
) -> Callable[..., Any]:
    """Make a function run with the largest batch size that fits, as a decorator with or without arguments.

    The function is called as `function(batch_size, *args, **kwargs)`. When memory runs out, it is called again
    with a smaller size. The size that worked is where the next call starts.

    On several processes all must call it, and they agree: if memory runs out on any of them, all try again
    with the same smaller size, including those that had finished. The rank that ran out leaves the process group, so
    that ranks that wait for it in a collective get an error from gloo; then all meet in a new group. This
    has limits:

    * Models (prepared or DDP) must be made inside the function; one that was made before has lost its group
      after a failed attempt, and raises an error about it. The same holds for groups of `torch.distributed.new_group`.
    * If something else outside of the function refers to the group, its connections stay open. There is a
      warning then, and a peer that waits in a collective waits until the group's timeout.
    * NCCL does not notice that a peer has left. If memory runs out on one GPU while another waits for it in
      a collective, NCCL's timeout ends the run (10 minutes by default).
    * A process that waits for a peer outside of collectives, in a store or a lock, is not released.
    * Another error is raised at once where it occurs, and nothing is tried again.

    Args:
        function: Function to call; None: returns a decorator.
        starting_batch_size: The first size, per process.
        reduce_batch_size_fn: Returns the next size, which must be smaller; the size of process 0 counts. None: 0.9
            times the last one, rounded down; with `accelerator`, the next one that divides the global batch.
        accelerator: Keeps the global batch: its `gradient_accumulation_steps` are raised by the factor that
            the size is reduced by, rounded up.

    Raises:
        RuntimeError: Not even a batch of 1 fits.
        TypeError: The function cannot be called with the batch size first and the arguments after it.
        ValueError: `starting_batch_size` is not a whole number from 0 on, or `reduce_batch_size_fn` returned a size
            that is not smaller.
    """
    starting_batch_size = whole_number("starting_batch_size", starting_batch_size, minimum=0)
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            accelerator=accelerator,
        )
    search = _Search(function, starting_batch_size, reduce_batch_size_fn, accelerator)

    @functools.wraps(function)
    def search_and_run(*args: Any, **kwargs: Any) -> Any:
        return search.run(args, kwargs)

    with contextlib.suppress(TypeError, ValueError):  # some functions written in C have no signature
        signature = inspect.signature(function)
        # The batch size, which the call does not give, is the first parameter unless `*args` takes it.
        rest = list(signature.parameters.values())
        rest = rest[1:] if rest and rest[0].kind is not inspect.Parameter.VAR_POSITIONAL else rest
        search_and_run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    return search_and_run


@dataclasses.dataclass(eq=False)
class _Search:
    """One decorated function with its current batch size."""

    function: Callable[..., Any]
    size: int
    reduce_size: Callable[[], int] | None
    accelerator: Accelerator | None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_call(args, kwargs)
        clear_device_cache(garbage_collection=True)
        peers = Peers() if world_size() > 1 else None
        steps = self.accelerator.gradient_accumulation_steps if self.accelerator else 1
        size, global_batch = self.size, self.size * steps
        while size > 0:
            again, result = self._attempt(peers, size, args, kwargs)
            if not again:
                self.size = size
                return result
            size = self._next_size(size, global_batch)
            if self.accelerator is not None and size > 0:
                self.accelerator.gradient_accumulation_steps = math.ceil(global_batch / size)
        raise RuntimeError(
            "No executable batch size found, reached zero. Not even a batch of 1 fits into the memory, "
            f"tried from {self.size} down. Use a smaller model, or sharding."
        )

    def _attempt(
        self, peers: Peers | None, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        result, error = None, None
        try:
            result = self.function(size, *args, **kwargs)
        except BaseException as caught:  # it is raised below, once the peers know of it
            error = caught
        try:
            if peers:
                again = peers.agree(error, should_reduce_batch_size)
            else:
                again = error is not None and should_reduce_batch_size(error)
            if error is not None and not again:
                raise error
            if again:
                clear_variables(error)
                result = None
        finally:
            # An error and the frame that names it would keep each other, and a batch of tensors, alive.
            del error
        if again:
            clear_device_cache(garbage_collection=peers is None)
        return again, result

    def _next_size(self, size: int, global_batch: int) -> int:
        if self.reduce_size is not None:
            reduced = self.reduce_size()
        elif self.accelerator is not None:
            reduced = next((less for less in range(int(size * 0.9), 0, -1) if global_batch % less == 0), 0)
        else:
            reduced = int(size * 0.9)
        reduced = int(broadcast_object_list([reduced])[0])
        if reduced >= size:
            raise ValueError(
                f"reduce_batch_size_fn returned {reduced} after a batch size of {size} had not fitted. It must return "
                "a smaller one each time it is called, or the search would not end."
            )
        return reduced

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = getattr(self.function, "__name__", repr(self.function))
        signature = inspect.signature(self.function)
        try:
            signature.bind(self.size, *args, **kwargs)
        except TypeError as error:
            wanted = ", ".join(list(signature.parameters)[1:])
            raise TypeError(
                f"{name}{signature} cannot be called with the batch size and {len(args) + len(kwargs)} more arguments "
                f"({error}). find_executable_batch_size passes the batch size itself, as the first argument: define "
                f"{name}(batch_size, ...) and call {name}({wanted})."
            ) from None
