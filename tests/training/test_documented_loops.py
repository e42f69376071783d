"""The loops of Accelerate's guides on gradient accumulation and synchronisation, by their import line only."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import notebook_launch

X = torch.arange(1.0, 9.0)
Y = 2 * X


def toy(steps: int) -> tuple[float, float]:
    """The self-contained example, which trains a bare tensor."""
    import copy

    from notebook_launcher import Accelerator, set_seed

    set_seed(0)
    dataset = TensorDataset(X, Y)
    dataloader = DataLoader(dataset, batch_size=len(X) // steps)
    model = torch.zeros((1, 1), requires_grad=True)
    model_clone = copy.deepcopy(model)
    criterion = torch.nn.MSELoss()
    model_optimizer = torch.optim.SGD([model], lr=0.02)
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model, model_optimizer, dataloader = accelerator.prepare(model, model_optimizer, dataloader)
    model_clone_optimizer = torch.optim.SGD([model_clone], lr=0.02)
    for inputs, labels in dataloader:
        with accelerator.accumulate(model):
            inputs, labels = inputs.view(-1, 1), labels.view(-1, 1)  # noqa: PLW2901 - as documented
            loss = criterion(inputs @ model, labels)
            accelerator.backward(loss)
            model_optimizer.step()
            model_optimizer.zero_grad()
    criterion(X.view(-1, 1) @ model_clone, Y.view(-1, 1)).backward()
    model_clone_optimizer.step()
    return model.mean().item(), model_clone.mean().item()


def pieces():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    dataloader = DataLoader(TensorDataset(X.view(-1, 1), Y.view(-1, 1)), batch_size=1)
    return model, optimizer, dataloader, scheduler, torch.nn.MSELoss()


def prepared_without_the_helper():
    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    model, optimizer, training_dataloader, scheduler, loss_function = pieces()
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    gradient_accumulation_steps = len(training_dataloader)
    for index, batch in enumerate(training_dataloader):
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        loss = loss / gradient_accumulation_steps
        accelerator.backward(loss)
        if (index + 1) % gradient_accumulation_steps == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.item()


def with_accumulate():
    from notebook_launcher import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=8)
    model, optimizer, training_dataloader, scheduler, loss_function = pieces()
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    for batch in training_dataloader:
        with accelerator.accumulate(model):
            inputs, targets = batch
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.item()


def with_no_sync():
    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    model, optimizer, dataloader, _, loss_func = pieces()
    ddp_model, dataloader, optimizer = accelerator.prepare(model, dataloader, optimizer)
    for index, batch in enumerate(dataloader):
        inputs, targets = batch
        if index != (len(dataloader) - 1):
            with accelerator.no_sync(ddp_model):
                loss = loss_func(ddp_model(inputs), targets) / len(dataloader)
                accelerator.backward(loss)
        else:
            loss = loss_func(ddp_model(inputs), targets) / len(dataloader)
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(ddp_model).weight.item()


def with_the_plugin():
    from notebook_launcher import Accelerator, GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer, dataloader, _, loss_function = pieces()
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    updates = 0
    for inputs, targets in dataloader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_function(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
    return updates, len(dataloader)


def all_loops() -> tuple[list[float], tuple[int, int]]:
    """Return the weights that all loops end with, and what the one with the plugin counts."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    weights = [weight for steps in (1, 2, 4, 8) if num_ranks * steps <= 8 for weight in toy(steps)]  # of 8 samples
    weights += [prepared_without_the_helper(), with_accumulate(), with_no_sync()]
    return weights, with_the_plugin()


@pytest.mark.parametrize("num_processes", [1, 4])
def test_documented_loops_train_alike_on_any_number_of_processes(num_processes):
    for weights, counts in notebook_launch(all_loops, num_processes, output="none"):
        assert {f"{weight:.5f}" for weight in weights} == {"2.04000"}
        assert counts == (8 // num_processes // 2, 8 // num_processes), "windows ignore the end of the loader"
