"""Models of all kinds under the Accelerator, and things that are prepared a second time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from notebook_launcher import notebook_launch
from notebook_launcher.errors import CaptureError
from notebook_launcher.training import (
    Accelerator,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    KwargsHandler,
    ProcessState,
    prepare_data_loader,
)
from tests.support.toy_training import make_data, make_model

mse = torch.nn.functional.mse_loss


def make_loader(num_samples=14):
    data = torch.utils.data.TensorDataset(*make_data(num_samples))
    return torch.utils.data.DataLoader(data, batch_size=2)


def train(model, steps=3, **options):
    """Train an epoch; return the weights and when the model was to synchronise."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    synced = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            synced.append(model.require_backward_grad_sync)
            accelerator.backward(mse(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()], synced


@pytest.mark.parametrize(("options", "ddp", "synced"), [
    ({}, {}, [False, False, True, True]),
    ({"dynamo_backend": "eager"}, {}, [False, False, True, True]),
    ({}, {"static_graph": True}, [True, False, True, True]),  # torch records the graph in the first
    ({}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}, [False, False, True, True]),
])  # fmt: skip
def test_model_built_with_any_ddp_options_trains_alike(ranks, options, ddp, synced):
    def both():
        handlers = [DistributedDataParallelKwargs(**ddp)]
        return train(make_model()), train(make_model(), kwargs_handlers=handlers, **options)

    for (plain, _), (built, when) in ranks.run(2, both):
        torch.testing.assert_close(built, plain)
        assert when == synced


def test_compiled_model_is_saved_by_its_own_names(ranks):
    def names():
        accelerator = Accelerator(cpu=True, dynamo_backend="eager")
        model = accelerator.prepare(make_model())
        inner = accelerator.unwrap_model(model)
        assert inner is not model
        assert inner(torch.ones(1, 3)).equal(model(torch.ones(1, 3)))
        return list(accelerator.get_state_dict(model)), list(inner._orig_mod.state_dict()), model.training

    own = list(make_model().state_dict())
    assert ranks.run(2, names) == [(own, own, True)] * 2


@pytest.mark.parametrize("steps", [1, 2])
def test_forward_may_wait_while_another_network_trains(ranks, steps):
    def adversaries():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        maker, critic = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (maker, critic)]
        maker, critic, made, judged, loader = accelerator.prepare(maker, critic, *optimizers, make_loader(12))
        for inputs, _ in loader:
            fakes = maker(inputs)
            with accelerator.accumulate(critic):
                accelerator.backward(critic(inputs).mean() - critic(fakes.detach()).mean())
                judged.step()
                judged.zero_grad()
            with accelerator.accumulate(maker):
                fakes = maker(inputs) if steps > 1 else fakes
                accelerator.backward(critic(fakes).mean())
                made.step()
                made.zero_grad()
        return [parameter.detach().clone() for net in (maker, critic) for parameter in net.parameters()]

    first, second = ranks.run(2, adversaries)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_objects_prepared_by_another_accelerator_are_adopted(ranks):
    def again():
        first, second = Accelerator(cpu=True), Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        made = first.prepare(model, optimizer, make_loader(12), scheduler)
        model, optimizer, loader, scheduler = second.prepare(*made)
        rates, samples = [], []
        for inputs, targets in loader:
            with second.accumulate(model):
                second.backward(mse(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates += scheduler.get_last_lr()
            samples += second.gather_for_metrics(inputs)[:, -1].tolist()
        assert model is made[0]
        assert second.gradient_state.active_dataloader is None
        return rates, len(samples), len(set(samples)), len(made[2])

    assert ranks.run(2, again) == [([1.0, 0.5, 0.25], 12, 12, 3)] * 2


def test_loader_for_other_ranks_is_refused():
    accelerator = Accelerator(cpu=True)
    foreign = prepare_data_loader(make_loader(), num_processes=3, process_index=0)
    with pytest.raises(
        ValueError, match=r"prepared for 3 processes, but this run has 1.*Prepare the original DataLoader"
    ):
        accelerator.prepare(foreign)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_second_accelerator_replaces_precision_of_model(wrap):
    model, inputs = wrap(make_model()), make_data(4)[0]
    exact = model(inputs)
    for precision, same in (("bf16", False), ("no", True), ("fp16", False), ("no", True)):
        model = Accelerator(cpu=True, mixed_precision=precision).prepare(model)
        assert model(inputs).equal(exact) == same


def test_models_are_freed_without_garbage_collector(ranks):
    def leave():
        def run():
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            kept = [weakref.ref(obj) for obj in (accelerator, model, optimizer)]
            model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(mse(model(inputs), targets))
                    optimizer.step()
            return kept

        run()  # what torch makes once, at its first use
        gc.collect()
        gc.disable()
        try:
            return [ref() is None for ref in run()]
        finally:
            gc.enable()

    assert ranks.run(2, leave) == [[True] * 3] * 2


def test_optimizer_outlives_its_accelerator():
    model: Any = make_model()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not model[0].weight.equal(before)


@pytest.mark.parametrize("make", [lambda: Accelerator(cpu=True), lambda: ProcessState(cpu=True)])
def test_object_made_for_one_process_is_refused_in_a_launch(make):
    mine = make()

    def ask():
        return mine.num_processes

    with pytest.raises(CaptureError, match=r"`mine`, an? notebook_launcher.*Create .* inside the function"):
        notebook_launch(ask, 2, output="none")


def test_handlers_return_only_arguments_that_differ_from_defaults():
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=4.0).to_kwargs() == {"init_scale": 4.0}
    assert DistributedDataParallelKwargs(bucket_cap_mb=1, comm_hook="fp16").to_kwargs() == {"bucket_cap_mb": 1}
    assert DistributedDataParallelKwargs(bucket_cap_mb=None).bucket_cap_mb == 25, "as torch's own"
    assert GradientAccumulationPlugin(num_steps=4).to_kwargs() == {"num_steps": 4}
    assert isinstance(GradScalerKwargs(), KwargsHandler)


def test_prepare_calls_the_methods_that_a_subclass_overrides() -> None:
    class Recording(Accelerator):
        def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return "a model"

        def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return "an optimizer"

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Recording(cpu=True).prepare(model, optimizer) == ("a model", "an optimizer")
