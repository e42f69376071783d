"""Arguments of the Accelerator of another type: an error that names the value, and not another training."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)

Net = torch.nn.Linear


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"dataloader_config": {"split_batches": True}}, r"dataloader_config=\{.*\} is not a DataLoaderConfiguration[.] P"),
    ({"project_config": "runs"}, "project_config='runs' is not a ProjectConfiguration. Pass ProjectConfiguration"),
    ({"kwargs_handlers": AutocastKwargs()}, r"AutocastKwargs\(.*\) is not a list. Write kwargs_handlers=\[AutocastK"),
    ({"kwargs_handlers": [AutocastKwargs]}, r"is unknown. Pass an object of the class: AutocastKwargs\(\)"),
    ({"rng_types": ["torch", "numpy"]}, r"rng_types=\['torch', 'numpy'\]: 'numpy' is unknown. It can hold 'torch', 'c"),
    ({"cpu": "yes"}, "cpu='yes' is a str; it must be True or False"),
    ({"check_ranks": "x"}, "check_ranks='x' is a str; it must be True or False"),
])  # fmt: skip
def test_argument_of_another_type_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Accelerator(**{"cpu": True, **arguments})


@pytest.mark.parametrize(("record", "arguments", "message"), [
    (DataLoaderConfiguration, {"even_batches": 3}, "even_batches=3 is an int; it must be True or False"),
    (DataLoaderConfiguration, {"data_seed": "7"}, "data_seed='7' is a str; it must be a whole number"),
    (InitProcessGroupKwargs, {"timeout": 600}, r"timeout=600 is an int; it must be a datetime.timedelta. Pass timede"),
    (ProfileKwargs, {"activities": "cpu"}, r"activities='cpu' is a str; it must be a list: \['cpu'\]"),
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
    (lambda a, m, o: a.prepare(torch.optim.SGD), r"got the class SGD. Pass an object of it: SGD\(...\)"),
    (lambda a, m, o: a.prepare(m.weight * 2), r"got a tensor that was computed \(MulBackward0\)"),
    (lambda a, m, o: a.prepare(m, device_placement=True), "device_placement=True is a bool; it must be a list"),
    (lambda a, m, o: a.prepare_scheduler(o), r"prepare_scheduler\(SGD\): pass a learning-rate scheduler"),
    (lambda a, m, o: a.prepare_data_loader([1]), r"prepare_data_loader\(list\): pass a DataLoader, such as"),
    (lambda a, m, o: a.skip_first_batches([1], 1), r"dataloader=\[1\] is not a DataLoader. Pass a prepared loader"),
    (lambda a, m, o: a.clip_grad_norm_(m.parameters(), -1), "max_norm=-1 must be 0 or more; to clip nothing, leave"),
    (lambda a, m, o: a.backward(m.weight.sum(), weight="3"), "weight='3' is not a number"),
    (lambda a, m, o: a.on_process(print, process_index="0"), "process_index='0' is a str; it must be a whole number"),
    (lambda a, m, o: a.no_sync(m), r"no_sync\(Linear\): nothing in it was prepared. Pass the model that"),
    (lambda a, m, o: a.autocast("bf16"), "autocast_handler='bf16' is not an AutocastKwargs. Pass AutocastKwargs"),
    (lambda a, m, o: a.join_uneven_inputs(m).__enter__(), r"join_uneven_inputs\(Linear\): pass a list of models"),
    (lambda a, m, o: a.log([0.5]), r"log\(list\): pass metrics by name, such as \{'loss': loss\}"),
    (lambda a, m, o: a.unscale_gradients(o), r"unscale_gradients\(SGD\): it was not prepared. Pass an optimizer that"),
    (lambda a, m, o: a.clip_grad_norm_(a, 1.0), "Gradients of an Accelerator cannot be clipped. Pass parameters"),
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


def test_bucket_size_none_is_the_one_of_torch() -> None:
    assert DistributedDataParallelKwargs(bucket_cap_mb=None).bucket_cap_mb == 25


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
