"""DeepSpeed's settings in ranks, which torch carries out, and DeepSpeed itself beside them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, DeepSpeedPlugin, notebook_launch, patch_environment
from tests.support.toy_training import fit, make_data, make_model, sessions_fixture, shards_on_cpus, whole

pytestmark = shards_on_cpus

ranks = sessions_fixture(2)


def prepared_steps(asked: dict[str, Any], call: dict[str, Any]) -> int:
    """Prepare a training by DeepSpeed's settings; return the micro-batches of its windows."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(**asked), **call)
    net = make_model()
    accelerator.prepare(net, torch.optim.SGD(net.parameters()), DataLoader(TensorDataset(*make_data(8)), 2))
    return accelerator.gradient_accumulation_steps


def test_settings_come_from_a_file_and_the_run_reports_their_effect(capsys):
    config = {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": False},
    }
    run = notebook_launch(prepared_steps, 2, args=({"hf_ds_config": config}, {}), devices="cpu", output="rank0")
    assert list(run) == [2, 2]
    shown = capsys.readouterr()
    assert "DeepSpeed's settings are carried out by torch. ZeRO stage 2" in shown.out + shown.err
    assert "Without effect: zero_optimization.overlap_comm" in shown.out + shown.err


def test_variables_of_accelerate_launch_ask_for_deepspeed(ranks):
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}

    def find() -> tuple[int, bool]:
        with patch_environment(**variables):
            accelerator = Accelerator(cpu=True)
        assert accelerator.deepspeed_plugin is not None
        return accelerator.deepspeed_plugin.zero_stage, accelerator.is_fsdp2

    assert ranks.run(2, find) == [(3, True)] * 2


@pytest.mark.parametrize(
    ("options", "asked", "call", "message"),
    [
        (
            {},
            {"hf_ds_config": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}},
            {},
            "4, but p",
        ),
        ({"shard": 2}, {"zero_stage": 0}, {}, "zero_stage=0 keeps a whole model .* the launch's shard=2"),
        ({}, {}, {"fsdp_plugin": 1}, "got both deepspeed_plugin and fsdp_plugin"),
    ],
)
def test_disagreement_in_a_rank_is_an_error_with_both_values(options, asked, call, message):
    with pytest.raises(ValueError, match=message):
        notebook_launch(prepared_steps, 2, args=(asked, call), devices="cpu", output="none", **options)


# --------------------------------------------------------------------------------------------------------------------
# DeepSpeed itself inside a launch, on its CPU accelerator: its updates, and those of torch in its place.
#
# At the first use it compiles a kernel, which takes a minute, so that CI leaves these tests out.


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
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=STEPS, gradient_clipping=0.25)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model: Any = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    fit(accelerator, model, optimizer, batches(accelerator.process_index))
    return whole(model.parameters())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install --no-build-isolation '.[deepspeed]'",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torch_updates_as_deepspeed_does_where_all_micro_batches_are_equal(stage: int):
    options: dict[str, Any] = {"devices": "cpu", "output": "none", "threads_per_process": 1}
    theirs = notebook_launch(train_with_deepspeed, NUM_RANKS, args=(stage,), **options)
    ours = notebook_launch(train_with_torch, NUM_RANKS, args=(stage,), **options)
    for mine in [*theirs, *ours]:
        torch.testing.assert_close(mine, theirs[0], atol=1e-5, rtol=1e-4)
