"""The exchange of a model's gradients that goes on after the backward: `overlap_with_forward`.

    backward       forward of the next window
    ┌─────────────┐┌─────────────────────────┐
     bucket 0 ──▶      │ wait, update │ …       early buckets: sent when they are ready, as DDP does
          bucket 1 ──▶
               bucket 3 ──▶                     late buckets: sent when all are ready, those first that the
                    bucket 2 ──▶                forward needs first

DDP calls a communication hook for each bucket and waits, at the end of the backward, for the futures that the hook has
returned. The hook here returns futures that are done already, and keeps the true ones. Afterwards stand-ins take the
places of the gradients (`PendingGradient`), `step()` notes its update, and weights whose update waits are hidden
(`PendingWeights`). Whoever reads a gradient or a weight waits for its bucket alone, and makes the update of the
parameters in it. The numbers are those of the ordinary loop with the same buckets.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.context import current
from notebook_launcher.training.accumulation.members.pending_buckets import PendingBucket
from notebook_launcher.training.accumulation.members.pending_weights import PendingWeights
from notebook_launcher.wording.text import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.nn.parallel import DistributedDataParallel

__all__ = ["Exchange", "bucket_cap", "mean_hook"]

NUM_BUCKETS = 16
"""Buckets that a large model's gradients fill, or more, because the first layers wait for a whole bucket."""
SMALLEST_CAP = 1.0
"""MiB to which buckets are made smaller. torch's compiler refuses models with smaller ones (torch 2.13)."""
SLOWER = 2
"""Buckets by which the early ones become fewer at once: one slow backward says little of the next."""


class Exchange:
    """The exchanges of one model's gradients.

    Args:
        model: The model, which is held weakly: its reducer holds this object.
        hook: The communication hook that reduces a bucket.
        group: The process group of the exchanges. They need one of their own: in DDP's group, its broadcast of buffers
            before a forward would wait behind them, and so would collectives of the user.
    """

    def __init__(
        self, model: DistributedDataParallel, hook: Callable[[Any, Any], Any], group: dist.ProcessGroup
    ) -> None:
        self.num_exchanges = 0
        """Number of backwards that have exchanged gradients."""
        self.is_compiled = False
        """True after a compiled forward, which would be compiled again if its weights were hidden."""
        self._model = weakref.ref(model)
        self._title = type(model.module).__name__
        self._hook = hook
        self._group = group
        self._buckets: list[PendingBucket] = []
        """The buckets of an exchange that is under way."""
        self._is_in_backward = False
        self._weights = PendingWeights(model.module, self._read)
        self._buckets_of: dict[int, PendingBucket] = {}
        """The bucket of each parameter whose update waits, by the parameter's id."""
        self._num_early: int | None = None
        """Number of early buckets; None until it is known how many fit beside the backward."""
        self._agreement: tuple[torch.Tensor, Any] | None = None
        """The number of early buckets of the next exchange, while the ranks agree on the least."""
        self._pid = os.getpid()
        launched = current()
        if launched is not None:
            launched.exchanges.add(self)
        # At the end of the process, too: other ranks need this rank's part of the exchange.
        self._reductions: list[Any] = []
        weakref.finalize(self, _await, self._reductions, self._pid)

    # In the backward.

    def reduce(self, _: Any, bucket: Any) -> Any:
        """Start the exchange of a bucket, as a communication hook; return its future, or one that is done."""
        model = self._model()
        if model is None or model._join_config.enable:  # noqa: SLF001 - ranks that have run out follow bucket by bucket
            return self._hook(self._group, bucket)
        if bucket.index() == 0:
            self._begin()
        answer = None
        if bucket.buffer().is_sparse:  # Its numbers would take the gradient's place, and not its memory.
            answer = self._hook(self._group, bucket)
        else:
            pending = PendingBucket(bucket, self._finish_bucket)
            self._buckets.append(pending)
            if self._num_early is None or bucket.index() < self._num_early:
                self._start(pending)
        if bucket.is_last():
            for late in reversed([pending for pending in self._buckets if not pending.is_started]):
                self._start(late)
            # DDP queues its own work after this call, so the queue is asked twice.
            _at_end_of_backward(lambda: _at_end_of_backward(self._end))
        return _done(bucket.buffer()) if answer is None else answer

    def _begin(self) -> None:
        if self._is_in_backward:  # The backward before has failed.
            self._give_up()
        self.finish()
        self._reductions.clear()
        self._is_in_backward = True
        self.num_exchanges += 1
        if self._agreement is not None:
            number, work = self._agreement
            work.wait()
            self._num_early, self._agreement = int(number), None

    def _start(self, bucket: PendingBucket) -> None:
        self._reductions.append(bucket.start(self._hook, self._group))

    def _end(self) -> None:
        """Put stand-ins in the places of the gradients, and let the ranks agree on the number of early buckets."""
        self._is_in_backward = False
        for bucket in self._buckets:
            bucket.stand_in(self.num_exchanges)
        if not self._has_final_buckets:
            return
        # Equal on all ranks, because they must start their collectives in one order.
        early = len(self._buckets) if self._num_early is None else min(self._num_early, len(self._buckets))
        num_done = sum(bucket.is_exchanged for bucket in self._buckets[:early])
        number = torch.tensor(early + 1 if num_done == early else max(1, num_done, early - SLOWER))
        self._agreement = number, dist.all_reduce(number, dist.ReduceOp.MIN, self._group, async_op=True)

    # Updates that wait.

    def can_wait(self) -> bool:
        """Return True if an update may wait for this exchange, because its weights can be hidden."""
        return self._has_final_buckets and not self.is_compiled and self._weights.can_be_watched()

    @property
    def _has_final_buckets(self) -> bool:
        """False while DDP will make its buckets anew at the next forward, by the sizes of the parameters."""
        model = self._model()
        assert model is not None  # It has called this, or its backward has.
        return model._has_rebuilt_buckets or (model.find_unused_parameters and not model.static_graph)  # noqa: SLF001

    def is_awaited(self, parameter: torch.Tensor) -> bool:
        """Return True if an update of the parameter waits."""
        return parameter in self._weights

    def has(self, bucket: PendingBucket) -> bool:
        """Return True if the bucket is one of this exchange, and not finished."""
        return any(bucket is one for one in self._buckets)

    def await_updates(self, waiting: Iterable[tuple[list[torch.Tensor], PendingBucket]]) -> None:
        """Hide parameters until their bucket makes their update."""
        hidden = []
        for parameters, bucket in waiting:
            self._buckets_of.update({id(parameter): bucket for parameter in parameters})
            hidden += parameters
        self._weights.hide(hidden)

    def _read(self, parameter: Any) -> None:
        bucket = self._buckets_of.get(id(parameter))
        if bucket is not None:
            bucket.finish()

    # The end of an exchange.

    def begin_forward(self) -> None:
        """Finish before a forward that does not read its weights module by module.

        Without gradients, layers of torch may compute in one piece for which they read the weights of several modules.
        """
        if not torch.is_grad_enabled() or not self._has_final_buckets:
            self.finish()

    def finish(self) -> None:
        """Wait for the exchange that is under way, if any, and make the updates that wait for it.

        Raises:
            RuntimeError: The exchange has failed, or weights were changed while their update waited.
        """
        if self._is_in_backward or not self._buckets:
            return
        for bucket in reversed(self._buckets):
            bucket.finish()
        self._buckets.clear()
        self._buckets_of.clear()
        self._weights.show_all()

    def _finish_bucket(self, bucket: PendingBucket) -> None:
        self._check_process()
        try:
            bucket.wait()
        except RuntimeError as error:
            self._give_up()
            raise RuntimeError(
                f"the exchange of gradients of {self._title}, which went on after its backward, has failed: {error}. "
                "Another rank has ended, or was lost; its own error says why. The last update of this rank's weights "
                "is missing, or made in part: load a checkpoint before you train on."
            ) from error
        with _undisturbed():
            changed = self._weights.show(bucket.parameters)
            bucket.deliver()
            if changed:
                shapes = first_few([str(tuple(data.shape)) for data in changed])
                self._give_up()
                raise RuntimeError(
                    f"{len(changed)} parameters of {self._title} (shapes {shapes})"
                    " were changed past their module between step() and the next forward, while their update waited "
                    "for the exchange of gradients (overlap_with_forward=True). Call accelerator.finish_exchange() "
                    "before you change them."
                )
            bucket.make_updates()

    def _give_up(self) -> None:
        """Forget the exchange that is under way; the weights stay as they are."""
        self._is_in_backward = False
        for bucket in self._buckets:
            if not bucket.is_finished:
                bucket.give_up()
        self._buckets.clear()
        self._buckets_of.clear()
        self._weights.show_all()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this process was forked while the gradients of {self._title} were exchanged, and has no part in it: "
                "call accelerator.finish_exchange() before you start processes that use the model, such as a "
                "DataLoader's workers."
            )


def mean_hook(group: dist.ProcessGroup, bucket: Any) -> Any:
    """Reduce a bucket to the mean over the ranks, with the same operations as DDP without a hook."""
    buffer = bucket.buffer()
    # As DDP: a product and a quotient can differ in the last bit.
    buffer.div_(group.size()) if buffer.is_sparse else buffer.mul_(1.0 / group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def bucket_cap(model: torch.nn.Module, asked: float) -> float:
    """Return the largest size of a bucket in MiB: as asked for, and at most a sixteenth of the gradients."""
    size = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
    return min(asked, max(SMALLEST_CAP, size / NUM_BUCKETS / 2**20))


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _at_end_of_backward(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)  # noqa: SLF001 - DDP does it so


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Compute as outside a forward: without gradients, inference mode and autocast."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def _await(reductions: list[Any], pid: int) -> None:
    for reduction in reductions if os.getpid() == pid else ():
        with contextlib.suppress(RuntimeError):  # A rank has ended, so nobody needs the rest.
            reduction.wait()
