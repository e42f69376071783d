"""Code that matters on GPUs, as far as it can be tried without one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from notebook_launcher import Accelerator, GradScalerKwargs
from notebook_launcher.training.checkpoints.loading import with_counters_on_cpu
from notebook_launcher.training.resolving import check_precision


@pytest.mark.parametrize(("fused", "max_grad_norm"), [(False, 1.0), (True, None)])
def test_step_that_overflows_is_skipped_and_the_schedule_waits(fused: bool, max_grad_norm: float | None) -> None:
    scaler = GradScalerKwargs(init_scale=1024.0)
    options: dict[str, Any] = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 1 + fused}
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler], **options)
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for scale in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        for _ in range(1 + fused):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum() * scale)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        seen.append((optimizer.step_was_skipped, torch.equal(before, model.weight), scheduler.get_last_lr()))
    assert seen == [(False, False, [0.05]), (True, True, [0.05]), (False, False, [0.025])]


def test_step_counters_of_a_checkpoint_are_loaded_onto_the_cpu() -> None:
    with FakeTensorMode():
        state = {"step": torch.zeros((), device="cuda"), "exp_avg": torch.zeros(3, device="cuda")}
        loaded = with_counters_on_cpu({"state": {0: state, 1: {}}, "param_groups": []})
    assert loaded["state"][0]["step"].device.type == "cpu"
    assert loaded["state"][0]["exp_avg"].device.type == "cuda"
    assert with_counters_on_cpu({"kind": "another"}) == {"kind": "another"}


@pytest.mark.parametrize(("capability", "num_warnings"), [((7, 5), 1), ((8, 6), 0)])
def test_bf16_that_is_emulated_warns_of_what_is_faster(
    capability: tuple[int, int], num_warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for precision in ("no", "fp16", "bf16"):
            check_precision(precision, torch.device("cuda"))
    told = [str(warning.message) for warning in caught]
    assert len(told) == num_warnings
    assert all("Tesla T4 has no bf16 arithmetic" in text and "'fp16' is faster" in text for text in told)
