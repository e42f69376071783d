"""Models that an Accelerator shards: their updates are those of a model that each rank has whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import FullyShardedDataParallelPlugin as Plugin
from notebook_launcher import ParallelismConfig, notebook_launch
from tests.support.toy_training import make_data, make_model, make_replicas, sessions_fixture, shards_on_cpus

pytestmark = shards_on_cpus


ranks = sessions_fixture(1, 2, 3, 4, set_up=make_replicas)


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights of a model, gathered."""
    found: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone() for tensor in found]


def train(order: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    from notebook_launcher import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, **settings)
    net: Any = make_model(seed=accelerator.process_index)  # of rank 0 alone the weights count
    plain: Any = torch.optim.AdamW(net.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(*make_data(29)), 2)
    if order == "together":
        plain, net, loader = accelerator.prepare(plain, net, loader)
    elif order == "model first":
        net = accelerator.prepare(net)
        plain, loader = accelerator.prepare(plain, loader)
    else:
        loader, plain = accelerator.prepare(loader, plain)
        net = accelerator.prepare(net)
    assert accelerator.is_fsdp2 == (accelerator.num_processes > 1 and bool(settings))
    assert accelerator.state.is_fsdp2 == accelerator.is_fsdp2
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(net):
                accelerator.backward(torch.nn.functional.mse_loss(net(inputs), targets))
                plain.step()
                plain.zero_grad()
    return whole(net)


@pytest.mark.parametrize(
    ("num_ranks", "order", "settings"),
    [
        (1, "together", {"fsdp_plugin": Plugin()}),
        (2, "model first", {"parallelism_config": ParallelismConfig(dp_shard_size=2)}),
        (3, "optimizer first", {"fsdp_plugin": Plugin(reshard_after_forward=False)}),
        (4, "together", {"fsdp_plugin": Plugin(cpu_offload=True, auto_wrap_policy="no_wrap")}),
        (4, "optimizer first", {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}),
    ],
)
def test_updates_are_those_of_whole_models(ranks, num_ranks, order, settings):
    expected = ranks.run(num_ranks, train, order, {})
    for mine in ranks.run(num_ranks, train, order, settings):
        torch.testing.assert_close(mine, expected[0])


def test_settings_of_fsdp1_without_effect_are_named_in_one_line(capsys):
    def shard() -> None:
        from notebook_launcher import Accelerator

        Accelerator(cpu=True, fsdp_plugin=Plugin(use_orig_params=True, limit_all_gathers=False))

    notebook_launch(shard, 2)
    said = [line for line in capsys.readouterr().out.splitlines() if "FullyShardedDataParallelPlugin" in line]
    assert len(said) == 1
    assert "without effect: use_orig_params, limit_all_gathers. Torch's FSDP2 shards the models" in said[0]


def test_offload_on_one_process_warns_that_it_has_no_effect():
    from notebook_launcher import Accelerator

    with pytest.warns(UserWarning, match="cpu_offload=True.* no effect here: one process keeps whole models.* on cpu"):
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(cpu_offload=True))
    assert not accelerator.is_fsdp2


def toy() -> tuple[float, bool, str]:
    """The documented example, whose exact weight is 2.04, with a model in place of the tensor."""
    from notebook_launcher import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: Any = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    inputs = torch.arange(1.0, 9.0).view(-1, 1)
    loader: Any = DataLoader(TensorDataset(inputs, 2 * inputs), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.gradient_accumulation_steps = len(loader)
    for batch, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(batch), targets))
            optimizer.step()
            optimizer.zero_grad()
    return float(model.weight.full_tensor()), accelerator.is_fsdp2, str(accelerator.distributed_type)


@pytest.mark.parametrize(("num_ranks", "shard"), [(2, 2), (4, 2)])
def test_an_accelerator_adopts_the_launch_s_shard_and_gives_the_documented_weight(num_ranks, shard):
    for weight, shards, kind in notebook_launch(toy, num_ranks, shard=shard, devices="cpu", output="none"):
        assert (f"{weight:.5f}", shards, kind) == ("2.04000", True, "DistributedType.FSDP")
