"""Sharded models: gradients are those of the full batch for each layout, precision and way to clip; settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import (
    Accelerator,
    DeepSpeedPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    notebook_launch,
)
from notebook_launcher import FullyShardedDataParallelPlugin as Plugin
from tests.support.toy_training import (
    fit,
    make_data,
    make_model,
    make_replicas,
    micro_batch,
    sessions_fixture,
    shards_on_cpus,
    whole,
)

pytestmark = shards_on_cpus

HYBRID: dict[str, Any] = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}

LAYOUTS = ("plain", "shard", "kept", "whole unit", "offload", "hybrid")
TOLERANCES = {"no": 1e-6, "bf16": 0.05, "fp16": 0.01}


def arguments(layout: str, num_ranks: int) -> dict[str, Any]:
    """Return the arguments of an Accelerator for a layout."""
    if layout == "hybrid":
        replicas = 2 if num_ranks % 2 == 0 else 1
        return {"parallelism_config": ParallelismConfig(replicas, num_ranks // replicas)}
    plugins = {
        "shard": Plugin(),
        "kept": Plugin(reshard_after_forward=False),
        "whole unit": Plugin(auto_wrap_policy="no_wrap"),
        "offload": Plugin(cpu_offload=True),
    }
    return {"fsdp_plugin": plugins.get(layout)}


ranks = sessions_fixture(1, 2, 3, 4, set_up=make_replicas)


def loss_of(outputs: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a mean over tokens, of which each sample has 1 to 4, and their number."""
    tokens = (inputs[:, -1:] * 64).round() % 4 + 1
    return ((outputs - targets).pow(2) * tokens).sum() / tokens.sum(), float(tokens.sum())


def clip(accelerator: Any, parameters: list[Any], how: str) -> None:
    clipper = torch.nn.utils if accelerator is None else accelerator
    if how == "norm":
        clipper.clip_grad_norm_(parameters, 0.05)
    elif how == "value":
        clipper.clip_grad_value_(parameters, 0.02)


def train(layout: str, options: dict[str, Any]) -> list[Any]:
    """Train for an epoch in a rank; return, for each update, weights before, samples, gradients and weights after."""
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(options["steps"], sync_each_batch=options["each"]),
        even_batches=False,
        mixed_precision=options["precision"],
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
        **arguments(layout, num_ranks),
    )
    net: Any = make_model(seed=accelerator.process_index)
    loader: Any = DataLoader(TensorDataset(*make_data(options["num_samples"])), options["batch_size"])
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    trained = list(net.parameters())
    for number, (inputs, _) in enumerate(loader):
        if number == options["leave"]:
            break
        with micro_batch(accelerator, optimizer, net) as backward:
            backward(10 * net(inputs).sum(), weight=1)
    updates: list[Any] = []
    seen: list[Any] = []
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            if not seen:
                before = whole(trained)
            loss, weight = loss_of(net(inputs), inputs, targets)
            accelerator.backward(loss, weight=weight)
            seen.append((inputs, targets) if loader.current_round.weights[accelerator.process_index] else None)
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                grads = whole(parameter.grad for parameter in trained)
            clip(accelerator, trained, options["clip"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            updates.append((before, [pair for pair in seen if pair], grads, whole(trained)))
            seen = []
    assert not seen, "the last window was left open"
    return updates


def check(results: list[Any], options: dict[str, Any]) -> None:
    """Compare each update with that of one process that sees the window of all ranks as one batch."""
    tolerance = TOLERANCES[options["precision"]]
    num_seen = 0
    for number, update in enumerate(zip(*results, strict=True)):
        net = make_model()
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), update[0][0], strict=True):
                parameter.copy_(value)
        pairs = [pair for rank in update for pair in rank[1]]
        inputs, targets = (torch.cat(column) for column in zip(*pairs, strict=True))
        num_seen += len(inputs)
        loss_of(net(inputs), inputs, targets)[0].backward()
        expected = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        clip(None, list(net.parameters()), options["clip"])
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        for rank, (_, _, grads, after) in enumerate(update):
            for what, mine, theirs in (("gradients", grads, expected), ("weights", after, list(net.parameters()))):
                far = max(float((one - other).detach().abs().max()) for one, other in zip(mine, theirs, strict=True))
                assert far <= tolerance, f"{what} of update {number} on rank {rank} differ by {far:.1e}"
    assert num_seen == options["num_samples"], "each sample counts once"


OPTIONS = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 4),
        "num_samples": st.integers(2, 17),
        "batch_size": st.integers(1, 3),
        "each": st.sampled_from([None, False, True]),
        "clip": st.sampled_from(["no", "norm", "value"]),
        "precision": st.sampled_from(["no", "no", "bf16", "fp16"]),
        "leave": st.integers(0, 2),
    }
)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=st.sampled_from(LAYOUTS), num_ranks=st.integers(1, 4), options=OPTIONS)
def test_updates_are_those_of_the_full_batch_in_each_layout(ranks, layout, num_ranks, options):
    check(ranks.run(num_ranks, train, layout, options), options)


@pytest.mark.parametrize(("layout", "each"), [("shard", True), ("hybrid", None), ("hybrid", False), ("offload", False)])
def test_short_last_window_after_one_that_was_left_is_exact(ranks, layout, each):
    sizes = {"steps": 4, "num_samples": 23, "batch_size": 1, "leave": 2}
    options = {**sizes, "each": each, "clip": "norm", "precision": "no"}
    check(ranks.run(4, train, layout, options), options)


def count(each: bool | None) -> list[Any]:
    """Return the numbers of reduce-scatters and all-reduces in each backward of a window, with two replicas."""
    from torch.distributed.tensor.debug import CommDebugMode

    plugin = GradientAccumulationPlugin(3, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **arguments("hybrid", 4))
    net: Any = make_model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    counted = []
    for _ in range(3):
        with micro_batch(accelerator, optimizer, net) as backward:
            loss = net(torch.ones(2, 3)).sum()
            with CommDebugMode() as mode:
                backward(loss)
        found = {str(kind): number for kind, number in mode.get_comm_counts().items()}
        kinds = ("reduce_scatter", "allreduce")
        counted.append(tuple(sum(found[kind] for kind in found if name in kind) for name in kinds))
    return counted


@pytest.mark.parametrize(
    ("each", "expected"),
    [(None, [(2, 0), (2, 0), (2, 2)]), (False, [(0, 0), (0, 0), (2, 2)]), (True, [(2, 2), (2, 2), (2, 2)])],
)
def test_replicas_are_reduced_at_the_end_of_a_window_alone(ranks, each, expected):
    """Two units: each reduce-scatters its gradients over a replica's ranks, and all-reduces the sum over replicas."""
    for counted in ranks.run(4, count, each):
        assert counted == expected


# --------------------------------------------------------------------------------------------------------------------
# Orders of prepare, and settings that an Accelerator adopts.


def train_in_order(order: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    deepspeed = settings.get("deepspeed_plugin")
    given: dict[str, Any] = {} if deepspeed else {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}
    accelerator = Accelerator(cpu=True, **given, **settings)
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
    mesh = accelerator.torch_device_mesh
    assert accelerator.deepspeed_plugin is accelerator.state.deepspeed_plugin is deepspeed
    shards = accelerator.num_processes > 1 and bool(settings) and (deepspeed is None or deepspeed.zero_stage > 0)
    assert accelerator.is_fsdp2 == accelerator.state.is_fsdp2 == accelerator.is_composable_parallelism_enabled == shards
    assert str(accelerator.distributed_type).endswith("FSDP") == shards
    assert (None if mesh is None else mesh.size()) == (accelerator.num_processes if shards else None)
    assert not accelerator.multi_device
    for _ in range(2):
        fit(accelerator, net, plain, loader)
    return whole(net.parameters())


def zero(stage: int, **options: Any) -> dict[str, Any]:
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=3, gradient_clipping=0.5, **options)
    return {"deepspeed_plugin": plugin}


@pytest.mark.parametrize(
    ("num_ranks", "order", "settings"),
    [
        (1, "together", {"fsdp_plugin": Plugin()}),
        (2, "model first", {"parallelism_config": ParallelismConfig(dp_shard_size=2)}),
        (3, "optimizer first", {"fsdp_plugin": Plugin(reshard_after_forward=False)}),
        (4, "together", {"fsdp_plugin": Plugin(cpu_offload=True, auto_wrap_policy="no_wrap")}),
        (4, "optimizer first", HYBRID),
        (1, "together", zero(3)),
        (2, "together", zero(0)),
        (2, "model first", zero(1)),
        (2, "together", zero(3, offload_param_device="cpu")),
        (4, "together", {**zero(2), **HYBRID}),
    ],
)
def test_updates_are_those_of_whole_models(ranks, num_ranks, order, settings):
    expected = ranks.run(num_ranks, train_in_order, order, {})
    for mine in ranks.run(num_ranks, train_in_order, order, settings):
        torch.testing.assert_close(mine, expected[0])


def test_offload_on_one_process_warns_that_it_has_no_effect():
    with pytest.warns(UserWarning, match="cpu_offload=True.* no effect here: one process keeps whole models.* on cpu"):
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(cpu_offload=True))
    assert not accelerator.is_fsdp2


def toy(plugin: Plugin | None) -> tuple[float, bool, str]:
    """The documented example, whose exact weight is 2.04, with a model in place of the tensor."""
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model: Any = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    inputs = torch.arange(1.0, 9.0).view(-1, 1)
    loader: Any = DataLoader(TensorDataset(inputs, 2 * inputs), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.gradient_accumulation_steps = len(loader)
    fit(accelerator, model, optimizer, loader)
    return float(model.weight.full_tensor()), accelerator.is_fsdp2, str(accelerator.distributed_type)


@pytest.mark.parametrize(
    ("num_ranks", "plugin"), [(2, Plugin(use_orig_params=True, limit_all_gathers=False)), (4, None)]
)
def test_an_accelerator_adopts_the_launch_s_shard_and_gives_the_documented_weight(num_ranks, plugin, capsys):
    for weight, shards, kind in notebook_launch(toy, num_ranks, args=(plugin,), shard=2, devices="cpu"):
        assert (f"{weight:.5f}", shards, kind) == ("2.04000", True, "DistributedType.FSDP")
    said = [line for line in capsys.readouterr().out.splitlines() if "FullyShardedDataParallelPlugin" in line]
    assert len(said) == (plugin is not None)
    for line in said:
        assert "without effect: use_orig_params, limit_all_gathers. Torch's FSDP2 shards the models" in line
