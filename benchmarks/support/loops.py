"""One epoch of gradient accumulation, written by each contender in each variant of Accelerate's table.

The variants and their names come from its guide on gradient synchronisation. Gradients are all-reduced in every
micro-batch (by intention, or by mistake because only `backward` is in `no_sync`), or once per window.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from support.training import BATCH_SIZE, loss_of, make_data, make_model, make_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW = 4
"""Micro-batches per update."""
POWER_SGD: dict[str, Any] = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
"""PowerSGD starts after 1,000 updates by default; 2 is torch's minimum with error feedback."""
ONE_BUCKET: dict[str, Any] = {"bucket_cap_mb": 100}
"""One bucket for PowerSGD: with several buckets, its later all-reduces start in threads, over gloo in an order that
differs between the ranks, and both ranks fail ("Received data size doesn't match expected size", torch 2.13)."""

OPTIONS: dict[str, dict[str, Any]] = {"buckets": {"bucket_cap_mb": 1}}
"""Further contenders: our Accelerator with options of DDP."""

Batches = Any
"""An iterable of an epoch's batches, as (tokens,)."""


class HandWritten:
    """Plain DistributedDataParallel. `best` is the last of its variants."""

    variants = ("baseline", "mistake", "no_sync")

    def __init__(self, hook: str = "no") -> None:
        self.model = DistributedDataParallel(make_model(), **(ONE_BUCKET if hook == "power_sgd" else {}))
        self._optimizer = make_optimizer(self.model)
        if hook != "no":
            self.model.register_comm_hook(*hand_made_hook(hook))

    def loader(self, num_batches: int) -> Batches:
        data = make_data(num_batches, dist.get_world_size())
        return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, shuffle=False))

    def baseline(self, batches: Iterable[Any], last: int) -> None:
        for index, (tokens,) in enumerate(batches):
            loss: Any = loss_of(self.model, tokens)
            (loss / WINDOW).backward()
            self._update(index, last)

    def mistake(self, batches: Iterable[Any], last: int) -> None:
        for index, (tokens,) in enumerate(batches):
            loss: Any = loss_of(self.model, tokens)
            with contextlib.nullcontext() if is_boundary(index, last) else self.model.no_sync():
                (loss / WINDOW).backward()
            self._update(index, last)

    def no_sync(self, batches: Iterable[Any], last: int) -> None:
        for index, (tokens,) in enumerate(batches):
            with contextlib.nullcontext() if is_boundary(index, last) else self.model.no_sync():
                loss: Any = loss_of(self.model, tokens)
                (loss / WINDOW).backward()
            self._update(index, last)

    best = no_sync

    def _update(self, index: int, last: int) -> None:
        if is_boundary(index, last):
            self._optimizer.step()
            self._optimizer.zero_grad()


class WithAccelerator:
    """The loops with an `Accelerator`, Hugging Face's or ours; the code is the same."""

    variants = ("baseline", "mistake", "no_sync", "accumulate")

    def __init__(self, module: str, hook: str = "no", **ddp: Any) -> None:
        accelerator = importlib.import_module(module).Accelerator
        self._accelerator = accelerator(cpu=True, kwargs_handlers=handlers(module, hook, **ddp))
        model = make_model()
        self.model, self._optimizer = self._accelerator.prepare(model, make_optimizer(model))
        # Our Accelerator warns about the mistake, which is made on purpose here.
        warnings.filterwarnings("ignore", message=".*no_sync.*")

    def loader(self, num_batches: int) -> Batches:
        return self._accelerator.prepare(DataLoader(make_data(num_batches, dist.get_world_size()), BATCH_SIZE))

    def baseline(self, batches: Iterable[Any], last: int) -> None:
        self._accelerator.gradient_accumulation_steps = 1
        for index, (tokens,) in enumerate(batches):
            loss = loss_of(self.model, tokens)
            self._accelerator.backward(loss / WINDOW)
            self._update(index, last)

    def mistake(self, batches: Iterable[Any], last: int) -> None:
        self._accelerator.gradient_accumulation_steps = 1
        for index, (tokens,) in enumerate(batches):
            loss = loss_of(self.model, tokens)
            with contextlib.nullcontext() if is_boundary(index, last) else self._accelerator.no_sync(self.model):
                self._accelerator.backward(loss / WINDOW)
            self._update(index, last)

    def no_sync(self, batches: Iterable[Any], last: int) -> None:
        self._accelerator.gradient_accumulation_steps = 1
        for index, (tokens,) in enumerate(batches):
            with contextlib.nullcontext() if is_boundary(index, last) else self._accelerator.no_sync(self.model):
                loss = loss_of(self.model, tokens)
                self._accelerator.backward(loss / WINDOW)
            self._update(index, last)

    def accumulate(self, batches: Iterable[Any], last: int) -> None:  # noqa: ARG002 - the loader knows its end
        self._accelerator.gradient_accumulation_steps = WINDOW
        for (tokens,) in batches:
            with self._accelerator.accumulate(self.model):
                loss = loss_of(self.model, tokens)
                self._accelerator.backward(loss)
                self._optimizer.step()
                self._optimizer.zero_grad()

    best = accumulate

    def _update(self, index: int, last: int) -> None:
        if is_boundary(index, last):
            self._optimizer.step()
            self._optimizer.zero_grad()


def make_contender(name: str, hook: str = "no") -> HandWritten | WithAccelerator:
    if name == "hand":
        return HandWritten(hook)
    if name in OPTIONS:
        return WithAccelerator("notebook_launcher", hook, **OPTIONS[name])
    return WithAccelerator({"ours": "notebook_launcher", "accelerate": "accelerate"}[name], hook)


def is_boundary(index: int, last: int) -> bool:
    """Return True if a window ends with this micro-batch."""
    return index % WINDOW == WINDOW - 1 or index == last


def hand_made_hook(hook: str) -> tuple[Any, Any]:
    """Return the state and the hook, as `register_comm_hook` takes them."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "power_sgd":
        return powerSGD_hook.PowerSGDState(process_group=None, **POWER_SGD), powerSGD_hook.powerSGD_hook
    if hook == "bf16":
        # Under its own name, DistributedDataParallel refuses this hook without NCCL, although gloo supports it.
        return None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)  # noqa: PLW0108
    return None, default_hooks.fp16_compress_hook


def handlers(module: str, hook: str, **ddp: Any) -> list[Any]:
    """Return the hook, and further options of DDP, in the form of an Accelerator's `kwargs_handlers`."""
    if hook == "no" and not ddp:
        return []
    options = {"comm_state_option": dict(POWER_SGD), **ONE_BUCKET, **ddp} if hook == "power_sgd" else ddp
    if module == "notebook_launcher":
        from notebook_launcher import DistributedDataParallelKwargs

        return [DistributedDataParallelKwargs(comm_hook=hook, **options)]
    import accelerate

    kind = accelerate.utils.DDPCommunicationHookType(hook)
    return [accelerate.DistributedDataParallelKwargs(comm_hook=kind, **options)]
