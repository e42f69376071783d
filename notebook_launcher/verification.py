"""Accelerate's documented toy model, trained on every combination of processes and accumulation.

x = 1 ... 8, y = 2x, one weight that starts at 0, SGD with a learning rate of 0.02, and one update that sees
all the data, however it is cut: 2.04000 (huggingface.co/docs/accelerate, "Performing gradient
accumulation").
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError
from notebook_launcher.kernel.session import Session
from notebook_launcher.settings.option_checks import check_whole_number
from notebook_launcher.wording import bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPECTED = 2.04
NUM_SAMPLES = 8
LEARNING_RATE = 0.02
TOLERANCE = 5e-6
"""Half of the last digit shown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRow:
    """Weights of one combination of processes and accumulation steps."""

    num_processes: int
    gradient_accumulation_steps: int
    micro_batch: int
    """Samples in each backward of each rank."""
    accumulated: tuple[float, ...]
    """Each rank's weight after one update with `accumulate`."""
    by_hand: tuple[float, ...]
    """Each rank's weight after one update with `no_sync` written out."""
    whole: float
    """The weight after one update on the whole batch, without accumulation and ranks."""

    @property
    def ok(self) -> bool:
        """True if all weights of the combination are 2.04000."""
        return all(abs(weight - EXPECTED) < TOLERANCE for weight in (*self.accumulated, *self.by_hand, self.whole))


@dataclasses.dataclass(frozen=True, slots=True)
class VerificationReport:
    """All combinations; true if every weight is 2.04000."""

    rows: tuple[VerificationRow, ...]

    @property
    def ok(self) -> bool:
        """True if every weight is 2.04000."""
        return all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = f"{'processes':>9} {'steps':>6} {'micro-batch':>12} {'accumulate':>11} {'no_sync':>9} {'without':>9}"
        lines = [
            f"{row.num_processes:>9} {row.gradient_accumulation_steps:>6} {row.micro_batch:>12} "
            f"{_shown(row.accumulated):>11} {_shown(row.by_hand):>9} {row.whole:>9.5f}"
            f"{'' if row.ok else '   <- not 2.04000'}"
            for row in self.rows
        ]
        verdict = "every weight is 2.04000" if self.ok else "NOT every weight is 2.04000"
        return "\n".join([head, *lines, verdict])

    def __repr__(self) -> str:
        return bounded(str(self), "print(report) shows all")


def verify_accumulation(
    num_processes: Sequence[int] = (1, 2, 4), gradient_accumulation_steps: Sequence[int] = (1, 2, 4, 8), **options: Any
) -> VerificationReport:
    """Train the toy model on every combination that divides its 8 samples, on real ranks.

    Args:
        num_processes: Numbers of processes.
        gradient_accumulation_steps: Micro-batches per update.
        options: Options of the launches, by name.

    Returns:
        A table, which is true if every weight is 2.04000, with accumulation and without.

    Raises:
        ConfigError: The numbers are not whole numbers, or no combination of them divides the 8 samples.
    """
    given = {"num_processes": num_processes, "gradient_accumulation_steps": gradient_accumulation_steps}
    for name, numbers in given.items():
        for number in numbers:
            check_whole_number(name, number, minimum=0)
    fitting = {
        processes: [steps for steps in gradient_accumulation_steps if processes * steps in (1, 2, 4, 8)]
        for processes in num_processes
    }
    if not any(fitting.values()):
        raise ConfigError(
            f"num_processes={list(num_processes)}, gradient_accumulation_steps={list(gradient_accumulation_steps)}: "
            f"no combination divides the {NUM_SAMPLES} samples. Numbers that do are 1, 2, 4 and 8."
        )
    rows: list[VerificationRow] = []
    for processes, every in fitting.items():
        if every:
            with Session(processes, **{"output": "none", **options}) as session:
                rows += [_verify(session, processes, steps) for steps in every]
    return VerificationReport(tuple(rows))


def _verify(session: Session, processes: int, steps: int) -> VerificationRow:
    micro_batch = NUM_SAMPLES // (processes * steps)
    accumulated, by_hand, whole = zip(*session.run(_train_toy, args=(micro_batch, steps)), strict=True)
    return VerificationRow(
        num_processes=processes,
        gradient_accumulation_steps=steps,
        micro_batch=micro_batch,
        accumulated=accumulated,
        by_hand=by_hand,
        whole=whole[0],
    )


def _shown(weights: tuple[float, ...]) -> str:
    texts = sorted({f"{weight:.5f}" for weight in weights})
    return texts[0] if len(texts) == 1 else "..".join((texts[0], texts[-1]))


def _train_toy(micro_batch: int, steps: int) -> tuple[float, float, float]:
    """Return the weight after one update: with `accumulate`, with `no_sync` by hand, and on the whole batch."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from notebook_launcher.training.accelerator import Accelerator

    x = torch.arange(1.0, NUM_SAMPLES + 1).view(-1, 1)
    dataset, mse = TensorDataset(x, 2 * x), torch.nn.functional.mse_loss
    weights = []
    for by_hand in (False, True):
        # The loss is divided by hand too, so the Accelerator must not divide it.
        accelerator = Accelerator(gradient_accumulation_steps=1 if by_hand else steps)
        model: Any = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, micro_batch))
        for number, (inputs, targets) in enumerate(loader, 1):
            is_last = number == len(loader)
            block = accelerator.no_sync(model) if by_hand else accelerator.accumulate(model)
            with contextlib.nullcontext() if by_hand and is_last else block:
                accelerator.backward(mse(model(inputs), targets) / (len(loader) if by_hand else 1))
                if is_last or not by_hand:
                    optimizer.step()
                    optimizer.zero_grad()
        weights.append(accelerator.unwrap_model(model).weight.item())
    whole = torch.zeros(1, 1, requires_grad=True)
    mse(x @ whole, 2 * x).backward()
    assert whole.grad is not None
    return weights[0], weights[1], float(-LEARNING_RATE * whole.grad)
