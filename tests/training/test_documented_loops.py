"""The loops of Accelerate's guides on gradient accumulation and synchronisation, by their import line only."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, GradientAccumulationPlugin, notebook_launch

X = torch.arange(1.0, 9.0)
Y = 2 * X


def pieces():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    dataloader = DataLoader(TensorDataset(X.view(-1, 1), Y.view(-1, 1)), batch_size=1)
    return model, optimizer, dataloader, scheduler, torch.nn.MSELoss()


def prepared_without_the_helper():
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


def with_no_sync():
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
    return [prepared_without_the_helper(), with_no_sync()], with_the_plugin()


@pytest.mark.parametrize("num_processes", [1, 4])
def test_documented_loops_train_alike_on_any_number_of_processes(num_processes):
    for weights, counts in notebook_launch(all_loops, num_processes, output="none"):
        assert {f"{weight:.5f}" for weight in weights} == {"2.04000"}
        assert counts == (8 // num_processes // 2, 8 // num_processes), "windows ignore the end of the loader"
