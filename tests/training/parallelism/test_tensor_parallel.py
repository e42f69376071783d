"""Layers that several ranks compute together: exact windows over the ranks that read different data."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, ParallelismConfig
from tests.support.toy_training import fit, make_data, micro_batch, sessions_fixture, shards_on_cpus, whole

pytestmark = shards_on_cpus
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
MESHES = [(1, 2, 2), (2, 1, 2), (1, 1, 4)]
"""Replicas, shards, and ranks that compute layers together."""


def make_meshes() -> None:
    """Make the groups of all meshes, whose sockets stay open as long as the ranks."""
    for sizes in MESHES:
        Accelerator(cpu=True, parallelism_config=config(sizes))


ranks = sessions_fixture(4, set_up=make_meshes)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(3)
        self.up = torch.nn.Linear(3, 8)
        self.down = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class Net(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, inputs: torch.Tensor) -> Any:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def config(sizes: tuple[int, int, int]) -> ParallelismConfig:
    return ParallelismConfig(*sizes, tp_plan=PLAN if sizes[-1] > 1 else None)


def windows(
    sizes: tuple[int, int, int],
    num_samples: int,
    batch_size: int,
    steps: int,
    sync_each: bool | None,  # the sessions pass arguments by position
    clip: float | None,
) -> list[Any]:
    """Return the samples of each window that this rank read and that count, the window's gradient, and its norm."""
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=config(sizes),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps, sync_each_batch=sync_each),
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    net: Any = Net(accelerator.process_index)  # rank 0's weights count
    data = TensorDataset(*make_data(num_samples), torch.arange(num_samples))
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.0), DataLoader(data, batch_size)
    )
    found: list[Any] = []
    read: list[int] = []
    real: list[int] = []
    for inputs, targets, numbers in loader:
        with accelerator.accumulate(net):
            accelerator.backward(torch.nn.functional.mse_loss(net(inputs), targets))
            read += numbers.tolist()
            real += accelerator.gather_for_metrics(numbers).tolist()
            if accelerator.sync_gradients:
                norm = None if clip is None else accelerator.clip_grad_norm_(net.parameters(), clip)
                found.append((read, real, whole([parameter.grad for parameter in net.parameters()]), norm))
                read, real = [], []
            optimizer.step()
            optimizer.zero_grad()
    return found


def expected(numbers: set[int], num_samples: int, clip: float | None) -> tuple[list[torch.Tensor], Any]:
    net = Net()
    inputs, targets = (column[sorted(numbers)] for column in make_data(num_samples))
    torch.nn.functional.mse_loss(net(inputs), targets).backward()
    norm = None if clip is None else torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], norm


@settings(max_examples=5, deadline=None)
@given(
    sizes=st.sampled_from(MESHES),
    num_samples=st.integers(1, 13),
    batch_size=st.integers(1, 4),
    steps=st.integers(1, 3),
    sync_each=st.sampled_from([None, False, True]),
    clip=st.sampled_from([None, 0.1]),
)
def test_gradient_of_any_window_is_that_of_its_samples(ranks, sizes, num_samples, batch_size, steps, sync_each, clip):
    results = ranks.run(4, windows, sizes, num_samples, batch_size, steps, sync_each, clip)
    tp_size = sizes[-1]
    for first in range(0, 4, tp_size):
        reads = [[read for read, *_ in result] for result in results[first : first + tp_size]]
        assert reads == [reads[0]] * tp_size, "the ranks of a group read the same rows"
    assert sorted(number for _, real, _, _ in results[0] for number in real) == list(range(num_samples))
    for at, (_, real, _, _) in enumerate(results[0]):
        gradients, norm = expected(set(real), num_samples, clip)
        for result in results:
            torch.testing.assert_close(result[at][2], gradients, atol=1e-6, rtol=1e-5)
            if norm is not None:
                torch.testing.assert_close(result[at][3], norm)


def train(sizes: tuple[int, int, int] | None) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Return the weights after 4 updates, the gathered predictions, and the rows of a rank's generator."""
    mesh = None if sizes is None else config(sizes)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=mesh)
    net: Any = Net(accelerator.process_index)
    num_readers = 4 if sizes is None else sizes[0] * sizes[1]
    loader: Any = DataLoader(TensorDataset(*make_data(40)), batch_size=20 // num_readers)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader)
    for _ in range(2):
        fit(accelerator, net, optimizer, loader)
    with torch.no_grad():
        seen = [accelerator.gather_for_metrics(inputs[:, -1]) for inputs, _ in loader]
    return whole(list(net.parameters())), torch.cat(seen).sort().values, int(torch.randint(1 << 30, ()))


def test_updates_equal_those_of_whole_models_and_metrics_count_each_sample_once(ranks):
    plain, seen, _ = ranks.run(4, train, None)[0]
    assert len(seen) == 40
    for sizes in MESHES:
        results = ranks.run(4, train, sizes)
        for weights, mine, _ in results:
            torch.testing.assert_close(weights, plain, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(mine, seen)
        drawn = [number for _, _, number in results]
        for first in range(0, 4, sizes[-1]):
            assert len(set(drawn[first : first + sizes[-1]])) == 1, "a group draws the same random numbers"


class InPlace(Net):
    """Changes what cut layers and units return, views among it, in place."""

    def forward(self, inputs: torch.Tensor) -> Any:
        for layer in self.layers:
            outputs = layer(inputs)
            outputs += inputs
            inputs = outputs
        return self.head(inputs)


class Bare(Block):
    def forward(self, inputs: torch.Tensor) -> Any:
        return self.down(torch.relu_(self.up(self.norm(inputs)))).view(-1, 3)


def test_outputs_may_be_changed_in_place_as_in_a_whole_model(ranks):
    def gradients(sizes: tuple[int, int, int] | None) -> tuple[list[torch.Tensor], list[str]]:
        net: Any = InPlace()
        for layer in net.layers:
            layer.__class__ = Bare
        inputs, targets = make_data(8)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            accelerator = Accelerator(cpu=True, parallelism_config=None if sizes is None else config(sizes))
            net = accelerator.prepare(net)
            accelerator.backward(torch.nn.functional.mse_loss(net(inputs), targets))
        views = [text for warning in told if "view" in (text := str(warning.message))]
        return whole([parameter.grad for parameter in net.parameters()]), views

    expected, _ = ranks.run(4, gradients, None)[0]
    for sizes in (*MESHES, (1, 4, 1)):
        for mine, views in ranks.run(4, gradients, sizes):
            torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-5)
            assert not views


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attn, self.third = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.third.weight = self.first.weight
        self.config = SimpleNamespace(num_attention_heads=2, num_key_value_heads=1)


def prepare(kind: type[torch.nn.Module], plan: dict[str, Any] | None, dispatches: bool | None = None) -> Any:
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2, tp_plan=plan),
        dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches),
    )
    return accelerator.prepare(kind(), DataLoader(TensorDataset(*make_data(8))))[0]


@pytest.mark.parametrize(
    ("kind", "plan", "dispatches", "message"),
    [
        (Net, None, None, "Net has no plan for tensor parallelism.*write ParallelismConfig"),
        (Net, {"layers.*.up": "diagonal"}, None, "'diagonal': this style is not supported. It can be 'colwise'"),
        (Net, {"blocks.*.up": "colwise"}, None, r"tp_plan\['blocks.\*.up'\]: no module of Net has such a name"),
        (Net, {"head": "colwise"}, None, "tp_size=2 does not divide head.out_features=1, which 'colwise' cuts"),
        (Tied, {"attn": "colwise"}, None, "tp_size=2 does not divide Tied's num_key_value_heads=1, so attn"),
        (Tied, {"first": "colwise", "third": "rowwise"}, None, "the weight that Linear and Linear share in two ways"),
        (Net, PLAN, True, r"dispatch_batches=True with tp_size=2.*dispatch_batches=False"),
    ],
)
def test_plan_that_cannot_be_carried_out_is_refused(ranks, kind, plan, dispatches, message):
    with pytest.raises(ValueError, match=message):
        ranks.run(4, prepare, kind, plan, dispatches)


def test_weights_that_layers_share_stay_shared_and_styles_of_torch_are_taken(ranks):
    def share() -> tuple[bool, tuple[int, ...]]:
        from torch.distributed.tensor.parallel import ColwiseParallel

        style = ColwiseParallel()
        net = prepare(Tied, {"first": style, "third": style})
        return net.first.weight is net.third.weight, tuple(net.first.weight.to_local().shape)

    assert ranks.run(4, share) == [(True, (1, 4))] * 4


def test_rank_has_a_number_along_each_dimension_of_the_mesh(ranks):
    def numbers() -> tuple[int, ...]:
        accelerator = Accelerator(cpu=True, parallelism_config=config((1, 2, 2)))
        with accelerator.maybe_context_parallel(buffers=[], buffer_seq_dims=[]):
            names = ("data_parallel_shard", "tensor_parallel", "data_parallel")
        return tuple(getattr(accelerator, f"{name}_rank") for name in names)

    assert ranks.run(4, numbers) == [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)]


@pytest.mark.slow
def test_model_of_transformers_brings_its_plan(ranks):
    def train(sizes: tuple[int, int, int] | None) -> list[torch.Tensor]:
        from transformers import LlamaConfig, LlamaForCausalLM

        mesh = None if sizes is None else ParallelismConfig(*sizes)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=mesh)
        torch.manual_seed(accelerator.process_index)
        widths: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        net: Any = LlamaForCausalLM(LlamaConfig(**widths, **heads, tie_word_embeddings=True))
        tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(3))
        loader: Any = DataLoader(TensorDataset(tokens), 2 if sizes is None else 8 // (sizes[0] * sizes[1]))
        net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader)
        for (batch,) in loader:
            with micro_batch(accelerator, optimizer, net) as backward:
                backward(net(input_ids=batch, labels=batch).loss)
        return whole([parameter.detach() for parameter in net.parameters()])

    expected = ranks.run(4, train, None)[0]
    for mine in ranks.run(4, train, (1, 2, 2)):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)
