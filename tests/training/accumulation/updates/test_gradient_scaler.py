"""The scaler of fp16 losses, beside windows that are open when its scale changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher import Accelerator, GradScalerKwargs


def one_weight() -> torch.nn.Linear:
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    return linear


@pytest.mark.parametrize("overflows", [True, False])
def test_window_that_is_open_when_the_scale_changes_keeps_its_mean(*, overflows: bool) -> None:
    handler = GradScalerKwargs() if overflows else GradScalerKwargs(init_scale=2.0**4, growth_interval=1)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision="fp16", kwargs_handlers=[handler]
    )
    critic, maker = one_weight(), one_weight()
    optimizers = torch.optim.SGD(critic.parameters(), lr=0.0), torch.optim.SGD(maker.parameters(), lr=0.0)
    critic, maker, of_critic, of_maker = accelerator.prepare(critic, maker, *optimizers)
    scaler: Any = accelerator.scaler
    found, scales, inputs = [], [], torch.ones(2, 1)
    for number in range(4):
        with accelerator.accumulate(critic):
            accelerator.backward((critic(inputs) * (10.0 if overflows and number < 2 else 1.0)).mean())
            of_critic.step()
            of_critic.zero_grad()
        with accelerator.accumulate(maker):
            accelerator.backward(maker(inputs).mean())
            if accelerator.sync_gradients:
                accelerator.unscale_gradients(of_maker)
                found.append(maker.weight.grad.item())
            of_maker.step()
            of_maker.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] != scales[1]
    assert found == [1.0, 1.0]
