"""Local SGD: every rank updates by itself, and the weights are averaged now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.training.accumulation.members import is_sharded
from notebook_launcher.training.operations.collectives import all_reduce
from notebook_launcher.wording import class_name

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from notebook_launcher.training.accumulation.micro_batches import MicroBatches


class LocalSGD:
    """Train without synchronising gradients; average the parameters every so many steps, and at the end.

        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for inputs, targets in loader:
                ...
                optimizer.step()
                local_sgd.step()

    Local SGD is another algorithm than data parallelism, with less traffic (Stich, "Local SGD Converges Fast and
    Communicates Little", ICLR 2019). Buffers, such as a batch norm's, stay each rank's own. On one process
    nothing happens.

    The `with` block begins the training without synchronisation.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: As `prepare` returned it.
        local_sgd_steps: Number of calls of `step` between two averages. All ranks must make as many.
        enabled: False: ordinary data parallelism.

    Raises:
        ValueError: The steps are less than one, or every rank has a part of the model only.
    """

    def __init__(self, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True) -> None:
        self.local_sgd_steps = whole_number("local_sgd_steps", local_sgd_steps)
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        """Calls of `step` so far."""
        self._accelerator = accelerator
        self._micro_batches: MicroBatches = accelerator._micro_batches  # noqa: SLF001 - the user passes the whole
        self._model = model
        self._alone: AbstractContextManager[None] | None = None
        """The `no_sync` around the block; None outside of it."""
        if self.enabled and is_sharded(model):
            raise ValueError(
                f"LocalSGD: fully_shard was applied to this {class_name(model)}, so no rank has all weights and "
                "can train by itself. Prepare the model without fully_shard, or pass enabled=False."
            )

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._alone = self._accelerator.no_sync(self._model)
            self._alone.__enter__()
            self._micro_batches.note_local_training(self._model, is_on=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._alone is None:
            return
        self._micro_batches.note_local_training(self._model, is_on=False)
        alone, self._alone = self._alone, None
        alone.__exit__(kind, error, trace)
        if kind is None:  # after an error the other ranks may never come to the average
            self._average()

    def step(self) -> None:
        """Count one step; every `local_sgd_steps` of them the parameters become their mean over all ranks."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        for parameter in self._model.parameters():
            # Optimizers and DDP refer to this memory, so it stays; `data`, because autograd must not record the copy.
            parameter.data.copy_(all_reduce(parameter.data, "mean"))
        self._micro_batches.note_average()
