"""Updates that wait for their gradients, part by part, while the ranks exchange these beside the next forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from notebook_launcher.training.accumulation.members.pending_gradients import PendingGradient

if TYPE_CHECKING:
    from notebook_launcher.training.accumulation.members.exchange import Exchange
    from notebook_launcher.training.accumulation.members.pending_buckets import PendingBucket
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState

__all__ = ["NotedUpdate", "note_update"]

SEPARABLE = {
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
"""Optimizers of torch that update each parameter by its own gradient and state alone."""

Group = dict[str, Any]


def note_update(optimizer: torch.optim.Optimizer, exchanges: list[Exchange], gradient_state: GradientState) -> bool:
    """Note the update of a `step()` whose gradients are being exchanged; return False if `step()` is to make it now.

    Args:
        optimizer: The optimizer, as the user made it.
        exchanges: The exchanges of the models that it may update.
        gradient_state: The windows, which watch for changes of weights.
    """
    waiting = [one for group in optimizer.param_groups for one in group["params"] if _is_pending(one)]
    if not waiting:
        return False
    in_use = [exchange for exchange in exchanges if any(exchange.has(one.grad.bucket) for one in waiting)]
    if not _is_separable(optimizer) or any(
        not exchange.can_wait() or any(exchange.is_awaited(one) for one in waiting) for exchange in in_use
    ):
        for exchange in in_use:
            exchange.finish()
        return False
    # Hooks of the process look at the optimizer and its gradients, as rank_check does; now is the time of the step.
    for hook in list(torch_optimizer._global_optimizer_pre_hooks.values()):  # noqa: SLF001 - torch calls them as well
        hook(optimizer, (optimizer,), {})
    NotedUpdate(optimizer, gradient_state).begin(in_use)
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001 - for the warning of torch's schedulers
    return True


class NotedUpdate:
    """One update of one optimizer, with the settings that its groups had at `step()`.

    Args:
        optimizer: The optimizer.
        gradient_state: The windows.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, gradient_state: GradientState) -> None:
        self._optimizer = optimizer
        self._gradient_state = gradient_state
        self._groups_of: dict[int, list[Group]] = {}
        """Groups of the parameters in each bucket, by the bucket's id."""

    def begin(self, exchanges: list[Exchange]) -> None:
        """Update the parameters whose gradients are there, and let the others wait."""
        ready: list[Group] = []
        waiting: dict[int, tuple[list[torch.Tensor], PendingBucket]] = {}
        for group in self._optimizer.param_groups:
            settings = {name: _kept(value) for name, value in group.items() if name != "params"}
            parts: dict[int, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                bucket = parameter.grad.bucket if _is_pending(parameter) else None
                parts.setdefault(id(bucket), []).append(parameter)
                if bucket is not None:
                    waiting.setdefault(id(bucket), ([], bucket))[0].append(parameter)
            for key, parameters in parts.items():
                groups = ready if key == id(None) else self._groups_of.setdefault(key, [])
                groups.append({**settings, "params": parameters})
        if any(parameter.grad is not None for group in ready for parameter in group["params"]):
            self._step(ready)
        for _, bucket in waiting.values():
            bucket.updates.append(self)
        for exchange in exchanges:
            exchange.await_updates(pair for pair in waiting.values() if exchange.has(pair[1]))

    def make(self, bucket: PendingBucket) -> None:
        """Update the parameters of a bucket whose gradients are there."""
        groups = self._groups_of.pop(id(bucket))
        self._step(groups)
        # This is the update of the window before, and no change inside the window that has begun.
        changed = {id(parameter) for group in groups for parameter in group["params"]}
        block = self._gradient_state.block
        while block is not None:
            versions = block.window.weight_versions
            for at, probe in enumerate(block.probes):
                if id(probe) in changed and at < len(versions):
                    versions[at] = probe._version  # type: ignore[union-attr] # noqa: SLF001 - torch has no public name
            block = block.outer

    def _step(self, groups: list[Group]) -> None:
        """Call the optimizer's own step with these groups, without the hooks that torch puts around it."""
        optimizer, step = self._optimizer, type(self._optimizer).step
        plain: Any = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        before, optimizer.param_groups = optimizer.param_groups, groups
        try:
            plain(optimizer)
        finally:
            optimizer.param_groups = before


def _is_pending(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    return isinstance(gradient, PendingGradient) and not gradient.bucket.is_finished


def _is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if steps with some of the gradients at a time make the update of one step with all of them.

    The user's hooks would be called several times, and so would a step that somebody has put in the place of torch's.
    """
    kind, replaced = type(optimizer), optimizer.__dict__.get("step")
    return (
        kind.__name__ in SEPARABLE
        and kind is getattr(torch.optim, kind.__name__, None)
        and (replaced is None or hasattr(replaced, "_wrapped_by_lr_sched"))
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and not optimizer._optimizer_step_pre_hooks  # noqa: SLF001 - torch has no public name
        and not optimizer._optimizer_step_post_hooks  # noqa: SLF001
        and not torch_optimizer._global_optimizer_post_hooks  # noqa: SLF001
        and all(
            type(hook).__module__.startswith("notebook_launcher.")
            for hook in torch_optimizer._global_optimizer_pre_hooks.values()  # noqa: SLF001
        )
    )


def _kept(value: Any) -> Any:
    """Return a setting as it is now; schedulers write into tensors."""
    return value.clone() if isinstance(value, torch.Tensor) else value
