"""DeepSpeed itself inside a launch, on its CPU accelerator: its updates, and those of torch in its place.

It is installed by `pip install --no-build-isolation '.[deepspeed]'`. At the first use it compiles a kernel, which takes
a minute, so that CI leaves these tests out.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from notebook_launcher import notebook_launch
from tests.support.toy_training import make_data, make_model, shards_on_cpus

pytestmark = [
    shards_on_cpus,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: pip install --no-build-isolation '.[deepspeed]'",
    ),
]
NUM_RANKS, STEPS, BATCH, UPDATES = 2, 2, 3, 4


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a rank's micro-batches, as a prepared loader deals them out."""
    inputs, targets = make_data(NUM_RANKS * STEPS * BATCH * UPDATES)
    parts = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    return parts[rank::NUM_RANKS]


def train_with_deepspeed(stage: int) -> list[torch.Tensor]:
    import deepspeed
    import torch.distributed as dist

    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": STEPS,
        "gradient_clipping": 0.25,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for inputs, targets in batches(dist.get_rank()):
        engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            found.append(parameter.detach().clone())
    return found


def train_with_torch(stage: int) -> list[torch.Tensor]:
    from notebook_launcher import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=STEPS, gradient_clipping=0.25)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model: Any = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for inputs, targets in batches(accelerator.process_index):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torch_updates_as_deepspeed_does_where_all_micro_batches_are_equal(stage: int):
    options: dict[str, Any] = {"devices": "cpu", "output": "none", "threads_per_process": 1}
    theirs = notebook_launch(train_with_deepspeed, NUM_RANKS, args=(stage,), **options)
    ours = notebook_launch(train_with_torch, NUM_RANKS, args=(stage,), **options)
    for mine in [*theirs, *ours]:
        torch.testing.assert_close(mine, theirs[0], atol=1e-5, rtol=1e-4)
