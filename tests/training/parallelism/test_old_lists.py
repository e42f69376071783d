"""Lists of parameters from before a model was sharded: prepared optimizers and clipping take the sharded ones."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator
from notebook_launcher import FullyShardedDataParallelPlugin as Plugin
from tests.support.toy_training import session_fixture, shards_on_cpus

if TYPE_CHECKING:
    from notebook_launcher import Session

pytestmark = shards_on_cpus
ranks = session_fixture(2)


def weights_after(*, shards: bool, clips: str, unfreezes: bool = False) -> list[torch.Tensor]:
    """Train with lists that were made before `prepare`; return the whole weights."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2) if shards else None)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double()
    first = list(model[0].parameters())
    if unfreezes:
        model[0].requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.SGD(parameters, lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    if unfreezes:
        for parameter in first:
            parameter.requires_grad_(True)
        with pytest.raises(TypeError, match="ordered collections"):
            optimizer.add_param_group({"params": set(first)})
        optimizer.add_param_group({"params": first})
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(3):
        inputs = torch.randn(8, 4, dtype=torch.double, generator=generator)
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            if clips == "norm":
                norm = accelerator.clip_grad_norm_(parameters, 0.01)
                assert norm is not None
                assert norm > 0
            else:
                accelerator.clip_grad_value_(parameters, 0.001)
            optimizer.step()
            optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def train_with_an_optimizer_that_stays_unprepared(num_steps: int) -> list[str]:
    """Return the warnings of two windows."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps, fsdp_plugin=Plugin(fsdp_version=2))
    model: Any = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = accelerator.prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * num_steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).mean())
                if accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
    return [str(one.message) for one in caught]


def whole(parameter: Any) -> torch.Tensor:
    tensor: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach().clone()


@pytest.mark.parametrize("clips", ["norm", "value"])
def test_gradients_of_an_old_list_are_clipped(ranks: Session, clips: str) -> None:
    def train() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return weights_after(shards=True, clips=clips), weights_after(shards=False, clips=clips)

    for sharded, replicated in ranks.run(train):
        torch.testing.assert_close(sharded, replicated, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_optimizer_of_whole_parameters_that_trains_nothing_warns(ranks: Session, num_steps: int) -> None:
    for messages in ranks.run(train_with_an_optimizer_that_stays_unprepared, args=(num_steps,)):
        assert messages[0].startswith("a sharded model has gradients that no optimizer has used or cleared.")


def test_group_of_an_old_list_that_was_unfrozen_is_trained(ranks: Session) -> None:
    def train() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        sharded = weights_after(shards=True, clips="value", unfreezes=True)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double()
        return sharded, [parameter.detach().clone() for parameter in model.parameters()]

    for after, before in ranks.run(train):
        assert all(not torch.equal(one, other) for one, other in zip(after, before, strict=True))
