"""Settings of an Accelerator: adopted from the launch, given in the code, or refused."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from notebook_launcher import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    LaunchConfig,
    notebook_launch,
)


def test_settings_of_the_launch_are_adopted():
    def settings(**arguments):
        accelerator = Accelerator(cpu=True, **arguments)
        hook = str(accelerator.ddp_handler.comm_hook)
        return (
            accelerator.mixed_precision, accelerator.gradient_accumulation_steps, accelerator.max_grad_norm, hook,
        )  # fmt: skip

    launch: dict[str, Any] = {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.5,
        "comm_hook": "bf16",
    }
    adopted = notebook_launch(settings, 2, output="none", **launch)
    assert list(adopted) == [("bf16", 3, 0.5, "bf16")] * 2
    mine: dict[str, Any] = {"mixed_precision": "no", "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    assert notebook_launch(settings, 1, kwargs=mine, output="none", **launch)[0] == ("no", 2, 1.0, "bf16")


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"mixed_precision": "fp32"}, ValueError, r"mixed_precision='fp32' is unknown.* It can be 'no', 'fp16', 'bf16'[.]"),
    ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps=0 is too small"),
    ({"gradient_accumulation_steps": 1.5}, ValueError, "gradient_accumulation_steps=1[.]5 is a float"),
    ({"max_grad_norm": -1}, ValueError, "max_grad_norm=-1 must be more than 0 and finite; None means no clipping"),
    ({"gradient_acumulation_steps": 2}, TypeError, r"no argument gradient_acumulation_steps=[.] Did you mean"),
    ({"megatron_lm_plugin": object()}, ValueError, r"Accelerator\(megatron_lm_plugin=...\): Megatron-LM is not supp"),
    ({"deepspeed_plugins": {}}, ValueError, r"\(deepspeed_plugins=...\): one DeepSpeedPlugin serves all models"),
    ({"dynamo_backend": "foo"}, ValueError, "dynamo_backend='foo' is no backend of .* 'eager'.*'inductor'"),
    ({"kwargs_handlers": [3]}, ValueError, "kwargs_handlers holds 3, which is unknown"),
])  # fmt: skip
def test_invalid_settings_raise_with_valid_values(arguments, error, message):
    with pytest.raises(error, match=message):
        Accelerator(cpu=True, **arguments)


def test_clipping_norm_may_be_numpys():
    given: Any = np.float32(0.5)
    limits = Accelerator(cpu=True, max_grad_norm=given).max_grad_norm, LaunchConfig(max_grad_norm=given).max_grad_norm
    assert [(limit, type(limit)) for limit in limits] == [(0.5, float)] * 2


def test_settings_given_twice_are_refused():
    plugin = GradientAccumulationPlugin(num_steps=4)
    with pytest.raises(
        ValueError, match=r"gradient_accumulation_steps=2 and gradient_accumulation_plugin=.* were both"
    ):
        Accelerator(cpu=True, gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)
    with pytest.raises(ValueError, match="holds two AutocastKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])
    with pytest.raises(ValueError, match="split_batches=True and dataloader_config with split_batches=False"):
        Accelerator(cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration())
    with pytest.raises(ValueError, match=r"uneven=.drop. is unknown[.] It can be .weigh., .stop., .error., .leave. or"):
        DataLoaderConfiguration(uneven="drop")
    with pytest.raises(ValueError, match=r"has 1 entries for 2 objects\. Pass True or False for each object"):
        Accelerator(cpu=True).prepare(1, 2, device_placement=[True])


def test_accelerator_reports_settings_in_which_code_and_launch_differ(capsys):
    def differ():
        Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2)

    notebook_launch(differ, 2, mixed_precision="bf16", gradient_accumulation_steps=2)
    said = [line for line in capsys.readouterr().out.splitlines() if "in the code" in line]
    assert said == ["Accelerator(): mixed_precision='no' in the code, 'bf16' in the launch. The code wins."]


def shard_with_torch_2_7() -> None:
    from torch.distributed.fsdp import FSDPModule

    with contextlib.suppress(AttributeError):
        del FSDPModule.set_force_sum_reduction_for_comms
    Accelerator().prepare(torch.nn.Linear(2, 2))


def test_sharding_on_cpus_with_a_torch_that_cannot_is_refused():
    with pytest.raises(RuntimeError, match=r"sharding on CPUs needs torch 2.8 or newer.* launch without sharding"):
        notebook_launch(shard_with_torch_2_7, 2, shard=2, devices="cpu", output="none")


@pytest.mark.parametrize(("given", "backend"), [("EAGER", "eager"), ("no", "no")])
def test_backends_may_have_the_names_of_accelerate(monkeypatch, given, backend):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", given)
    accelerator = Accelerator(cpu=True)
    assert accelerator.dynamo_backend == backend
    assert hasattr(accelerator.prepare(torch.nn.Linear(1, 1)), "_orig_mod") == (backend != "no")
    accelerator.dynamo_backend = None
    assert accelerator.dynamo_backend is None
