"""`check_accumulation` compares a window with one backward over all of its samples."""

from __future__ import annotations

import pytest
import torch

from tests.support.toy_windows import Training, mse


def test_check_accumulation_finds_the_exact_gradient():
    training = Training(steps=4)
    batches = [(training.inputs[:2], training.targets[:2]), (training.inputs[2:7], training.targets[2:7])]
    before = training.model.state_dict()["0.weight"].clone()
    report = training.accelerator.check_accumulation(
        training.model, batches, lambda model, batch: mse(model(batch[0]), batch[1])
    )
    assert report
    assert str(report).startswith("exact: 2 micro-batches (weight 7)")
    assert report.nominal == 0.5
    assert torch.equal(training.model.state_dict()["0.weight"], before)
    assert training.model[0].weight.grad is None
    assert training.micro_batch(0) is False, "the window that it used is closed"


def test_check_accumulation_finds_a_loss_that_is_no_mean():
    training = Training(steps=4)
    batches = [(training.inputs[:1], training.targets[:1]), (training.inputs[1:8], training.targets[1:8])]
    report = training.accelerator.check_accumulation(
        training.model,
        batches,
        lambda model, batch: mse(model(batch[0]), batch[1], reduction="sum"),
        weight=lambda _: 1,
    )
    assert not report
    assert report.relative < 1e-5, "the gradient is that of what the loss was said to be"
    assert "NOT A MEAN: the loss of two micro-batches joined is" in str(report)
    assert 'Return the sum and pass it as backward(loss, weight=num_tokens, reduction="sum")' in str(report)


def test_check_accumulation_finds_a_weight_that_is_not_what_the_loss_is_a_mean_over():
    training = Training(steps=2)
    batches = [(training.inputs[:1], training.targets[:1]), (training.inputs[1:4], training.targets[1:4])]
    report = training.accelerator.check_accumulation(
        training.model, batches, lambda model, batch: mse(model(batch[0]), batch[1]), weight=lambda _: 1
    )
    assert not report
    assert "Pass as weight= what the loss is the mean over" in str(report)


def test_check_accumulation_does_without_batches_that_cannot_be_joined():
    training = Training(steps=2)
    batches = [torch.zeros(2, 3), torch.zeros(2, 5)]
    report = training.accelerator.check_accumulation(
        training.model, batches, lambda model, batch: model(batch[:, :3]).mean()
    )
    assert report
    assert report.losses is None


def test_check_accumulation_refuses_empty_batches():
    training = Training()
    with pytest.raises(ValueError, match="gave no micro-batch"):
        training.accelerator.check_accumulation(training.model, [], lambda model, batch: model(batch))
