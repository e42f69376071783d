"""Arguments and settings of the Accelerator: adopted from the launch, given in the code, or refused by their values."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    LaunchConfig,
    notebook_launch,
)

Net = torch.nn.Linear


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"dataloader_config": {"split_batches": True}}, r"dataloader_config=\{.*\} is not a DataLoaderConfiguration[.] P"),
    ({"project_config": "runs"}, "project_config='runs' is not a ProjectConfiguration. Pass ProjectConfiguration"),
    ({"kwargs_handlers": [AutocastKwargs]}, r"is unknown. Pass an object of the class: AutocastKwargs\(\)"),
    ({"kwargs_handlers": [3]}, "kwargs_handlers holds 3, which is unknown"),
    ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "holds two AutocastKwargs"),
    ({"rng_types": ["torch", "numpy"]}, r"rng_types=\['torch', 'numpy'\]: 'numpy' is unknown. It can hold 'torch', 'c"),
    ({"cpu": "yes"}, "cpu='yes' is a str; it must be True or False"),
    ({"mixed_precision": "fp32"}, r"mixed_precision='fp32' is unknown.* It can be 'no', 'fp16', 'bf16'[.]"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 is too small"),
    ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps=1[.]5 is a float"),
    ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4)},
     r"gradient_accumulation_steps=2 and gradient_accumulation_plugin=.* were both"),
    ({"max_grad_norm": -1}, "max_grad_norm=-1 must be more than 0 and finite; None means no clipping"),
    ({"gradient_acumulation_steps": 2}, r"no argument gradient_acumulation_steps=[.] Did you mean"),
    ({"megatron_lm_plugin": object()}, r"Accelerator\(megatron_lm_plugin=...\): Megatron-LM is not supp"),
    ({"deepspeed_plugins": {}}, r"\(deepspeed_plugins=...\): one DeepSpeedPlugin serves all models"),
    ({"dynamo_backend": "foo"}, "dynamo_backend='foo' is no backend of .* 'eager'.*'inductor'"),
    ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()},
     "split_batches=True and dataloader_config with split_batches=False"),
])  # fmt: skip
def test_argument_that_cannot_be_is_refused_with_what_can(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Accelerator(**{"cpu": True, **arguments})


@pytest.mark.parametrize(("record", "arguments", "message"), [
    (DataLoaderConfiguration, {"even_batches": 3}, "even_batches=3 is an int; it must be True or False"),
    (DataLoaderConfiguration, {"uneven": "drop"}, "uneven=.drop. is unknown[.] It can be .weigh., .stop., .error., .l"),
    (DistributedDataParallelKwargs, {"comm_hook": "fp8"}, "comm_hook='fp8' is unknown. It can be 'no', 'fp16', 'bf16'"),
])  # fmt: skip
def test_field_of_another_type_is_refused(record: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        record(**arguments)


def test_record_of_another_package_is_named_with_its_module() -> None:
    other = types.new_class("AutocastKwargs")
    other.__module__ = "another.package"
    with pytest.raises(ValueError, match=r"It is from another.package; import AutocastKwargs from notebook_launcher"):
        Accelerator(cpu=True, kwargs_handlers=[other()])
    other.__name__ = "ProjectConfiguration"
    given: Any = other()
    with pytest.raises(TypeError, match=r"is the ProjectConfiguration of another.package. Import ProjectConf"):
        Accelerator(cpu=True, project_config=given)


@pytest.mark.parametrize(("call", "message"), [
    (lambda a, m, o: a.prepare([m, o]), r"prepare\(\) got a list that holds a Linear, and would return it unprepared"),
    (lambda a, m, o: a.prepare({"model": m}), r"prepare\(\) got a dict that holds a Linear.*prepare\(\*objects\)"),
    (lambda a, m, o: a.prepare(m.weight * 2), r"got a tensor that was computed \(MulBackward0\)"),
    (lambda a, m, o: a.prepare(1, 2, device_placement=[True]), r"has 1 entries for 2 objects\. Pass True or False for"),
    (lambda a, m, o: a.prepare_scheduler(o), r"prepare_scheduler\(SGD\): pass a learning-rate scheduler"),
    (lambda a, m, o: a.skip_first_batches([1], 1), r"dataloader=\[1\] is not a DataLoader. Pass a prepared loader"),
    (lambda a, m, o: a.clip_grad_norm_(m.parameters(), -1), "max_norm=-1 must be 0 or more; to clip nothing, leave"),
    (lambda a, m, o: a.backward(m.weight.sum(), weight="3"), "weight='3' is not a number"),
    (lambda a, m, o: a.on_process(print, process_index="0"), "process_index='0' is a str; it must be a whole number"),
    (lambda a, m, o: a.no_sync(m), r"no_sync\(Linear\): nothing in it was prepared. Pass the model that"),
    (lambda a, m, o: a.autocast("bf16"), "autocast_handler='bf16' is not an AutocastKwargs. Pass AutocastKwargs"),
    (lambda a, m, o: a.log([0.5]), r"log\(list\): pass metrics by name, such as \{'loss': loss\}"),
    (lambda a, m, o: a.unscale_gradients(o), r"unscale_gradients\(SGD\): it was not prepared. Pass an optimizer that"),
])  # fmt: skip
def test_method_refuses_an_argument_of_another_type(call: Any, message: str) -> None:
    model = Net(1, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        call(Accelerator(cpu=True), model, optimizer_of(model))


def test_what_is_none_of_these_comes_back_as_it_is() -> None:
    accelerator, data = Accelerator(cpu=True), TensorDataset(torch.ones(2, 1))
    given = ("text", 3, [1, 2], {"a": 1}, data, int, None)
    assert accelerator.prepare(*given) == given
    loader = accelerator.prepare(DataLoader(data))
    assert len(loader) == 2


def test_gradients_of_a_model_can_be_clipped_by_its_name() -> None:
    accelerator, model = Accelerator(cpu=True), Net(1, 1, bias=False)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    norm = accelerator.clip_grad_norm_(model, 1.0)
    assert norm is not None
    assert norm.item() == 4.0
    accelerator.clip_grad_value_(model, 0.25)
    assert next(model.parameters()).grad.item() == 0.25


@pytest.mark.parametrize("choose", [lambda g, p: None, lambda g, p: [g], lambda g, p: p], ids=["all", "given", "its"])
def test_unscale_gradients_takes_the_name_before_prepare(choose: Any) -> None:
    handler = GradScalerKwargs(init_scale=4.0)
    accelerator, model = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler]), Net(1, 1, bias=False)
    given = optimizer_of(model)
    model, prepared = accelerator.prepare(model, given)
    accelerator.backward(model(torch.full((1, 1), 3.0)).sum())
    assert next(model.parameters()).grad.item() == 12.0
    accelerator.unscale_gradients(choose(given, prepared))
    assert next(model.parameters()).grad.item() == 3.0


def test_settings_of_the_launch_are_adopted():
    def settings(**arguments):
        a = Accelerator(cpu=True, **arguments)
        return a.mixed_precision, a.gradient_accumulation_steps, a.max_grad_norm, str(a.ddp_handler.comm_hook)

    launch: dict[str, Any] = {
        "mixed_precision": "bf16", "gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "comm_hook": "bf16",
    }  # fmt: skip
    adopted = notebook_launch(settings, 2, output="none", **launch)
    assert list(adopted) == [("bf16", 3, 0.5, "bf16")] * 2
    mine: dict[str, Any] = {"mixed_precision": "no", "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    assert notebook_launch(settings, 1, kwargs=mine, output="none", **launch)[0] == ("no", 2, 1.0, "bf16")


def test_clipping_norm_may_be_numpys():
    given: Any = np.float32(0.5)
    limits = Accelerator(cpu=True, max_grad_norm=given).max_grad_norm, LaunchConfig(max_grad_norm=given).max_grad_norm
    assert [(limit, type(limit)) for limit in limits] == [(0.5, float)] * 2


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
