"""Weights and corrections that stay on their device: no wait for them, and the same gradients as by numbers."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator
from notebook_launcher.training.accumulation import weighing
from notebook_launcher.training.accumulation.weighing import checked_weight, rescale, stays_on_device
from tests.support.toy_training import sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.toy_training import Sessions

FACTOR = 1.2345678901234


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group whose collectives do nothing, so that tensors may lie on any device."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def with_gradient(values: torch.Tensor) -> torch.Tensor:
    parameter = torch.zeros_like(values, requires_grad=True)
    parameter.grad = values.clone()
    return parameter


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_factor_on_the_device_multiplies_as_exactly_as_a_number(dtype: torch.dtype) -> None:
    values = torch.randn(999, dtype=torch.float64).to(dtype)
    parameter = with_gradient(values)
    rescale([parameter, parameter, torch.zeros(1)], torch.tensor(FACTOR, dtype=torch.float64))
    exact = values.to(torch.promote_types(dtype, torch.float32)) * FACTOR
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, exact.to(dtype))


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="collectives of this torch do not run on the device meta (2.6)",
)
@pytest.mark.parametrize(
    ("steps", "are_tensors", "reduction"), [(1, True, "mean"), (3, False, "mean"), (3, True, "sum")]
)
@pytest.mark.usefixtures("two_ranks")
def test_weighted_window_on_a_device_never_reads_a_number_from_it(
    steps: int, are_tensors: bool, reduction: str
) -> None:
    """Tensors of the device `meta` have shapes and no numbers: whatever reads one raises."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, check_ranks=False)
    leaf: Any = accelerator.prepare(torch.zeros(4, requires_grad=True))
    torch.utils.swap_tensors(leaf, torch.zeros(4, device="meta", requires_grad=True))
    accelerator._micro_batches.weighing.device = leaf.device
    with pytest.raises(RuntimeError, match="cannot be called on meta"):
        leaf.sum().item()
    weights: list[Any] = [torch.empty((), device="meta") if are_tensors else weight for weight in (3.0, 1.0, 2.0)]
    for weight in weights:
        with accelerator.accumulate(leaf):
            accelerator.backward((leaf * 2).sum(), weight=weight, reduction=reduction)
    assert leaf.grad.device.type == "meta"
    if steps == 1:
        accelerator.backward((leaf * 2).sum(), weight=weights[0], reduction=reduction)  # Outside of any window.


# Weights that `backward` is given as tensors of a device: the same gradients as by numbers, and no read.


ranks = sessions_fixture(1, 2)
COUNTS = ([3.0, 1.0, 0.0, 5.0, 2.0, 0.0], [4.0, 0.0, 0.0, 1.0, 7.0, 2.0])
"""Weights of each rank's micro-batches: two windows of three."""


def train(*, keeps: bool, reduction: str, state_after: int | None = None) -> list[list[float]]:
    """Return the gradients of all updates; `keeps`: weights stay tensors, as those of a GPU do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighing, "stays_on_device", lambda weight, device: keeps and isinstance(weight, torch.Tensor))
        return _train(reduction, state_after)


def _train(reduction: str, state_after: int | None) -> list[list[float]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, check_ranks=False)
    torch.manual_seed(accelerator.process_index)
    model: Any = torch.nn.Linear(2, 1, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    gradients = []
    for number, count in enumerate(COUNTS[accelerator.process_index]):
        with accelerator.accumulate(model):
            losses = model(torch.randn(4, 2, dtype=torch.float64)).square()
            loss = losses.mean() if reduction == "mean" else losses.sum() * count
            accelerator.backward(loss, weight=torch.tensor(count), reduction=reduction)
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.flatten().tolist())
            optimizer.step()
            optimizer.zero_grad()
        if number == state_after:
            state = accelerator.gradient_state.state_dict()
            accelerator.gradient_state.load_state_dict(state)
            assert all(isinstance(window["weight"], float) for window in state["windows"])
    return gradients


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_on_a_device_give_the_gradients_of_numbers(ranks: Sessions, num_ranks: int, reduction: str) -> None:
    expected, found, saved = (
        ranks.run(num_ranks, lambda: train(keeps=keeps, reduction=reduction, state_after=after))  # noqa: B023
        for keeps, after in ((False, None), (True, None), (True, 1))
    )
    assert len(found[0]) == 2
    assert saved == found
    for mine, theirs in zip([*found, *saved], expected * 2, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-14)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_weight_that_cannot_be_is_an_error_as_a_number_and_nan_on_a_device(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"weight=.* must be 0 or more: the number of samples or tokens"):
        checked_weight(torch.tensor(weight), torch.device("cpu"))
    monkeypatch.setattr(weighing, "stays_on_device", lambda *_: True)
    kept = checked_weight(torch.tensor(weight), torch.device("cpu"))
    assert isinstance(kept, torch.Tensor)
    assert kept.isnan()


def test_weights_of_sparse_gradients_and_of_other_devices_are_numbers() -> None:
    """Rows of a micro-batch of weight 0 are left out of sparse gradients, which takes the number."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1), torch.ones(1, requires_grad=True))
    assert not weighing.has_sparse_gradients(accelerator._prepared.members.models_and_leaves)
    accelerator.prepare(torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True)))
    assert weighing.has_sparse_gradients(accelerator._prepared.members.models_and_leaves)
    meta = torch.empty((), device="meta")
    assert stays_on_device(meta, torch.device("meta"))
    with pytest.raises(TypeError, match="is not a number"):
        checked_weight(meta, torch.device("meta"), reads=True)
    # A tensor of another device or of several elements is read.
    assert not stays_on_device(torch.ones(()), torch.device("cpu"))
    assert not stays_on_device(torch.ones(()), torch.device("meta"))
    assert not stays_on_device(torch.ones(2, device="meta"), torch.device("meta"))
    assert not stays_on_device(3, torch.device("cuda"))


# Gradients that are there before a window: layers whose optimizer steps in every second window gather over both.


NUM_BATCHES = 7
BATCH_SIZE = 3


def squared(model: Any, inputs: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor) -> Any:
    """Return a mean over tokens."""
    return ((model(inputs) - targets).square().squeeze(1) * tokens).sum() / tokens.sum()


def errors(slow: int, num_steps: int, *, has_weights: bool) -> list[float]:
    """Train with one optimizer for each layer, of which one steps in every second window; return the errors.

    Args:
        slow: The layer whose optimizer steps in every second window.
        num_steps: Micro-batches of a window; 7 of them are in the data.
        has_weights: Pass `weight=`; otherwise the loader counts samples.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    generator = torch.Generator().manual_seed(0)
    num_samples = NUM_BATCHES * BATCH_SIZE * accelerator.num_processes
    inputs, targets = (torch.randn(num_samples, size, generator=generator, dtype=torch.float64) for size in (4, 1))
    tokens = torch.ones(num_samples, dtype=torch.float64)
    if has_weights:
        tokens = torch.randint(1, 9, (num_samples,), generator=generator).double()
    torch.manual_seed(1)
    reference: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)).double()
    raw: Any = copy.deepcopy(reference)
    loader = DataLoader(TensorDataset(inputs, targets, tokens), BATCH_SIZE)
    model, loader, *optimizers = accelerator.prepare(raw, loader, *make_optimizers(raw))
    references = make_optimizers(reference)

    found, begin, num_windows = [], 0, 0
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = squared(model, *batch)
            accelerator.backward(loss, weight=batch[2].sum() if has_weights else None)
            num_windows += accelerator.sync_gradients
            stepping = [1 - slow, slow] if num_windows % 2 == 0 else [1 - slow]
            if accelerator.sync_gradients:
                end = number * BATCH_SIZE * accelerator.num_processes
                squared(reference, inputs[begin:end], targets[begin:end], tokens[begin:end]).backward()
                begin = end
                mine, exact = raw[slow].weight.grad, reference[slow].weight.grad
                found.append(((mine - exact).norm() / exact.norm()).item())
                for at in stepping:
                    references[at].step()
                    references[at].zero_grad()
            for at in stepping:
                optimizers[at].step()
                optimizers[at].zero_grad()
    return found


def make_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]


@pytest.mark.parametrize(
    ("num_processes", "num_steps", "has_weights", "slow"), [(2, 4, False, 0), (1, 1, True, 1), (2, 2, True, 1)]
)
def test_correction_of_a_window_leaves_gradients_from_before_as_they_are(
    ranks: Sessions, num_processes: int, num_steps: int, has_weights: bool, slow: int
) -> None:
    def train() -> tuple[list[float], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return errors(slow, num_steps, has_weights=has_weights), [str(one.message) for one in caught]

    for found, messages in ranks.run(num_processes, train):
        assert len(messages) == (num_steps > 1 and slow == 0)
        assert all(message.startswith("a window began with gradients that") for message in messages)
        assert len(found) == -(-NUM_BATCHES // num_steps)
        assert max(found) < 1e-12
