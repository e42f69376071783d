"""Updates at the ends of windows in one process: clipping, schedules, and half precision."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from notebook_launcher import Accelerator, GradScalerKwargs
from tests.support.toy_training import one_weight
from tests.support.toy_windows import Training


def test_clipping_waits_for_the_end_of_the_window():
    training = Training(steps=2)
    norms = []
    for row in range(2):
        with training.accelerator.accumulate(training.model):
            training.accelerator.backward(training.loss(row))
            norms.append(training.accelerator.clip_grad_norm_(training.model.parameters(), 1e-3))
    assert norms[0] is None
    assert norms[1] is not None
    assert torch.nn.utils.get_total_norm(training.grads()).item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("has_closure", "updates"), [(False, 1), (True, 2)])
def test_max_grad_norm_clips_by_itself_also_what_a_closure_computes(has_closure, updates):
    training = Training(steps=2 // updates, max_grad_norm=1e-3)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}

    def compute() -> Any:
        training.optimizer.zero_grad()
        training.accelerator.backward(loss := training.loss(0))
        return loss

    for row in range(2):
        training.optimizer.step(compute) if has_closure else training.micro_batch(row)
    moved = torch.cat([(value - before[name]).flatten() for name, value in training.model.state_dict().items()])
    assert moved.norm().item() == pytest.approx(updates * 0.1 * 1e-3, rel=updates * 1e-3)
    assert training.accelerator.last_grad_norm is not None
    assert training.accelerator.last_grad_norm > 1e-3


class Decay:
    """A schedule by a method of an object that cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def at(self, step: float) -> float:
        return float(0.9**step)


SCHEDULES: dict[str, Any] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "method": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay().at),
    "scaled cycles": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3, scale_fn=Decay().at),
    "one after another": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 2)], [4]
    ),
    "two at once": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_preview_gives_the_rates_to_come_and_changes_nothing(name):
    accelerator = Accelerator(cpu=True)
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": torch.tensor(0.1)}, {"params": [parameters[1]], "lr": 0.01}]
    plain = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](plain)
    ahead = [accelerator.preview(schedule, 12, group=group) for group in (0, 1)]
    assert all(word in ahead[0]._repr_svg_() for word in ("<polyline", ">update 1<", ">12<"))
    optimizer, scheduler = accelerator.prepare(plain, schedule)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    before = repr((schedule.state_dict(), plain.state_dict(), plain.param_groups))
    later = [accelerator.preview(scheduler, 9, group=group) for group in (0, 1)]
    assert repr((schedule.state_dict(), plain.state_dict(), plain.param_groups)) == before
    for past, coming in zip(ahead, later, strict=True):
        assert past[3:] == pytest.approx(coming)
    for at in range(9):
        assert [float(group["lr"]) for group in plain.param_groups] == pytest.approx([rates[at] for rates in later])
        optimizer.step()
        scheduler.step()
    assert len(accelerator.preview(scheduler)) == (20 if name == "one cycle" else 100)
    with pytest.raises(TypeError, match=r"preview\(ReduceLROnPlateau\): its rates follow a metric"):
        accelerator.preview(lr_scheduler.ReduceLROnPlateau(plain))


def test_autocast_between_two_steps_leaves_the_second_optimizers_gradients_alone():
    scaler = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler])
    models = [accelerator.prepare(torch.nn.Linear(1, 1, bias=False)) for _ in range(2)]
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    for model in models:
        accelerator.backward(model(torch.ones(1, 1)).mean())
    accelerator.clip_grad_norm_([parameter for model in models for parameter in model.parameters()], 10.0)
    optimizers[0].step()
    with accelerator.autocast():
        assert accelerator.native_amp
    optimizers[1].step()
    assert models[1].weight.grad.tolist() == [[1.0]]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_model_returns_float32(precision):
    training = Training(steps=1, mixed_precision=precision)
    seen = []
    handle = training.model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    output = training.model(training.inputs)
    handle.remove()
    assert output.dtype == torch.float32
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    with training.accelerator.autocast():
        assert (training.inputs @ training.inputs.T).dtype == seen[0]
    plain = training.accelerator.unwrap_model(training.model, keep_fp32_wrapper=False)
    assert "forward" not in vars(plain)


@pytest.mark.parametrize("overflows", [True, False])
def test_window_that_is_open_when_the_scale_changes_keeps_its_mean(*, overflows: bool) -> None:
    handler = GradScalerKwargs() if overflows else GradScalerKwargs(init_scale=2.0**4, growth_interval=1)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision="fp16", kwargs_handlers=[handler]
    )
    critic, maker = one_weight().float(), one_weight().float()
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


@pytest.mark.parametrize("replaces_method", [False, True])
def test_zero_grad_of_an_optimizer_of_ones_own_is_called(*, replaces_method: bool) -> None:
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            called.append(set_to_none)

    called: list[Any] = []
    raw: Any = (torch.optim.SGD if replaces_method else Own)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    if replaces_method:
        raw.zero_grad = lambda *, set_to_none: called.append(set_to_none)
    Accelerator(cpu=True).prepare(raw).zero_grad()
    assert called == [True]
