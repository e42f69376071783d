"""The correction of a window, where its factor stays on the device: no wait for it, and the same gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from notebook_launcher import Accelerator
from notebook_launcher.training.accumulation.weighing import rescale

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    steps: int,
    are_tensors: bool,
    reduction: str,
) -> None:
    """Tensors of the device `meta` have shapes and no numbers: whatever reads one raises."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, check_ranks=False)
    leaf: Any = accelerator.prepare(torch.zeros(4, requires_grad=True))
    torch.utils.swap_tensors(leaf, torch.zeros(4, device="meta", requires_grad=True))
    accelerator._micro_batches._weighing._device = leaf.device
    with pytest.raises(RuntimeError, match="cannot be called on meta"):
        leaf.sum().item()
    weights: list[Any] = [torch.empty((), device="meta") if are_tensors else weight for weight in (3.0, 1.0, 2.0)]
    for weight in weights:
        with accelerator.accumulate(leaf):
            accelerator.backward((leaf * 2).sum(), weight=weight, reduction=reduction)
    assert leaf.grad.device.type == "meta"
    if steps == 1:
        accelerator.backward((leaf * 2).sum(), weight=weights[0], reduction=reduction)  # Outside of any window.
