"""DistributedDataParallel as `prepare` makes it: with notes of its forwards, and the communication hook."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher.training.fingerprints import fingerprint_nested
from notebook_launcher.training.plugins import DDPCommunicationHookType as Hook
from notebook_launcher.training.plugins import DistributedDataParallelKwargs
from notebook_launcher.training.process.arrivals import EVALUATION, meet

if TYPE_CHECKING:
    from collections.abc import Callable


DEFAULTS = DistributedDataParallelKwargs()
FORWARD_ALONE = 1
"""A forward ran whose backward will not synchronise."""
FORWARD_SYNCED = 2
FORWARD_REPEATED = 4
"""A second backward ran through a forward whose backward had already run.

DDP reduces once for each forward, so what it added stays the rank's own.
"""


class SyncedModel(DistributedDataParallel):
    """DistributedDataParallel that notes the state of the switch at each forward.

    DDP decides in the forward whether the backward synchronises. If the switch differs between forward and backward,
    each rank silently keeps its own gradients. `Updates.step` finds this in the notes and refuses the step.
    """

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # torch 2.15 advises another name, which Accelerate's options lack and which means something else if False.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(module, **kwargs)
        self.notes = Notes()
        """Notes of the forwards and backwards."""
        self.trained = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
        """The parameters that get gradients."""

    def has_gradients(self) -> bool:
        """Return True if any parameter has a gradient."""
        for parameter in self.trained:  # noqa: SIM110 - any() would make a generator at every backward
            if parameter.grad is not None:
                return True
        return False

    def grad_versions(self) -> list[int]:
        """Return the number of writes to each gradient; -1 for a parameter without a gradient."""
        return [-1 if tensor.grad is None else tensor.grad._version for tensor in self.trained]  # noqa: SLF001

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if torch.is_grad_enabled():
            notes = self.notes
            if self.require_backward_grad_sync:
                notes.forwards |= FORWARD_SYNCED
                notes.recorded = True
                # Not while it is compiled: the count would be compiled too, and make it compile at every step.
                if notes.compares and not torch.compiler.is_compiling() and notes.is_due:
                    notes.inputs = fingerprint_nested((inputs, kwargs))
            else:
                notes.forwards |= FORWARD_ALONE
        return super().forward(*inputs, **kwargs)

    def _sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, which DDP does in the first forward after a backward that synchronised."""
        is_shared = dist.get_world_size(self.process_group) == dist.get_world_size()
        evaluates = not torch.is_grad_enabled() and is_shared and not torch.compiler.is_compiling()
        if evaluates and not meet(EVALUATION) and dist.get_rank() == 0:
            return
        super()._sync_buffers()


@dataclasses.dataclass(slots=True)
class Notes:
    """Notes of a model's forwards and backwards, beside the module, whose `__setattr__` inspects every value."""

    forwards: int = 0
    """The states of the switch at the forwards whose backward has not run yet, as flags."""
    answered: int = 0
    """The states of the switch at the forwards of the last backward, whose gradients the parameters hold; 0: none."""
    recorded: bool = False
    """True after the first forward whose backward synchronises; `static_graph` records the graph there."""
    trains_alone: bool = False
    """True if each rank steps with its own gradients on purpose (`LocalSGD`)."""
    num_synced: int = 0
    """Number of backwards that have reduced the gradients; equal on all ranks."""
    compared: int = 0
    """The value of `num_synced` at which the ranks last compared their weights."""
    inputs: int | None = None
    """Fingerprint of the inputs of the last forward that was to be compared; None: none was, or no tensors."""
    compares: bool = False
    """True if the ranks compare their weights now and then."""
    own_state: str = ""
    """The name of the cause that left each rank an optimizer state of its own."""

    @property
    def is_due(self) -> bool:
        """True if the ranks compare their weights at the next backward that reduces: at 1, 2, 4, 8 and so on."""
        return not self.num_synced & (self.num_synced + 1)


def wrap(
    model: torch.nn.Module,
    device: torch.device,
    kwargs: DistributedDataParallelKwargs,
    process_group: Any = None,
    *,
    compares: bool = False,
) -> SyncedModel:
    """Return the model with its gradients synchronised; its weights become rank 0's.

    Args:
        model: On its device already.
        device: Its device.
        kwargs: DDP's options, and the communication hook.
        process_group: None: the default group.
        compares: True if the ranks compare the model's weights now and then.
    """
    names = ("dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view",
             "static_graph")  # fmt: skip
    # Only what differs from torch's defaults: newer versions warn of `broadcast_buffers`, whatever its value.
    given = {name: value for name in names if (value := getattr(kwargs, name)) != getattr(DEFAULTS, name)}
    if "power_sgd" in kwargs.comm_hook and device.type == "cpu":
        # PowerSGD's later reductions start from threads, in an order that differs between ranks. gloo mistakes one
        # for another, and fails or waits for ever (torch 2.13). A single bucket has only one order.
        assert kwargs.bucket_cap_mb is not None  # None becomes a number when the settings are made.
        given["bucket_cap_mb"] = max(kwargs.bucket_cap_mb, _one_bucket(model))
    devices = [device.index] if device.type == "cuda" else None
    synced = SyncedModel(model, device_ids=devices, process_group=process_group, **given)
    synced.notes.compares = compares
    _register_hook(synced, kwargs)
    return synced


def _one_bucket(model: torch.nn.Module) -> int:
    """Return the size of a bucket that holds all gradients, in MiB."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return (size >> 20) + 1


def _register_hook(model: SyncedModel, kwargs: DistributedDataParallelKwargs) -> None:
    chosen, state = _make_hook(model, kwargs)
    if chosen is None:
        return

    # The hook gets a name of its own, because torch refuses the bf16 hooks by their names on gloo, which can reduce
    # bf16. The hook has no annotations, because torch compares annotations with classes, and this module's are text.
    def reduce(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        return chosen(state, bucket)

    model.register_comm_hook(state, reduce)


def _make_hook(
    model: SyncedModel, kwargs: DistributedDataParallelKwargs
) -> tuple[Callable[[Any, Any], Any] | None, Any]:
    """Return the communication hook that the settings ask for, and its state; None: DDP's own reduction."""
    if kwargs.comm_hook == Hook.NO:
        return None, None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    simple = {Hook.FP16: default_hooks.fp16_compress_hook, Hook.BF16: default_hooks.bf16_compress_hook}
    power = {Hook.POWER_SGD: powerSGD_hook.powerSGD_hook, Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook}
    wrappers = {
        Hook.FP16: default_hooks.fp16_compress_wrapper,
        Hook.BF16: default_hooks.bf16_compress_wrapper,
    }
    hook: Any = simple.get(kwargs.comm_hook) or power.get(kwargs.comm_hook)  # type: ignore[call-overload]
    state: Any = model.process_group
    if kwargs.comm_hook in power:
        state = powerSGD_hook.PowerSGDState(model.process_group, **kwargs.comm_state_option)
    wrapper = wrappers.get(kwargs.comm_wrapper)  # type: ignore[call-overload]
    return hook if wrapper is None else wrapper(hook), state
