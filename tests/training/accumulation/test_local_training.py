"""`LocalSGD`: each rank's gradients are means over its own samples, however many the other ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, LocalSGD
from tests.support.toy_training import Sessions, sessions_fixture

ranks = sessions_fixture(2)


def gradients(num_samples: int, num_steps: int, *, weighs: bool) -> list[float]:
    accelerator = Accelerator(cpu=True, even_batches=False, gradient_accumulation_steps=num_steps)
    model = torch.nn.Linear(1, 1, bias=False)
    data: Any = torch.arange(1.0, num_samples + 1)[:, None]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(data, batch_size=2)
    )
    found = []
    with LocalSGD(accelerator, model, local_sgd_steps=100) as local:
        for numbers in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(numbers).mean(), weight=len(numbers) if weighs else None)
                if accelerator.sync_gradients:
                    found.append(next(model.parameters()).grad.item())
                optimizer.step()
                optimizer.zero_grad()
            local.step()
    return found


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize(("num_samples", "num_steps", "expected"), [
    (8, 1, [[1.5, 5.5], [3.5, 7.5]]),
    (7, 1, [[1.5, 5.5], [3.5, 7.0]]),
    (6, 1, [[1.5, 5.5], [3.5, 0.0]]),  # Rank 1 has no second batch.
    (7, 2, [[3.5], [14 / 3]]),
    (11, 2, [[3.5, 9.5], [5.5, 11.0]]),
])  # fmt: skip
def test_local_gradient_is_the_mean_over_the_ranks_own_samples(
    ranks: Sessions, num_samples: int, num_steps: int, expected: list[list[float]], *, weighs: bool
) -> None:
    found = ranks.run(2, lambda: gradients(num_samples, num_steps, weighs=weighs))
    assert [pytest.approx(mine, abs=1e-5) for mine in expected] == list(found)
