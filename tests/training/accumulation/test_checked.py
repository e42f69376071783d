"""`check_accumulation` compares a window with one backward over all of its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher import ConfigError, VerificationReport, verify_accumulation
from notebook_launcher.command_line.program import main
from notebook_launcher.verification import VerificationRow
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


def test_check_accumulation_finds_a_loss_divided_by_the_tokens_of_the_window():
    training = Training(steps=4)
    batches = [(training.inputs[:1], training.targets[:1]), (training.inputs[1:3], training.targets[1:3])]
    num_items = 3  # of the window, as the recipe for variable lengths divides

    def recipe(model, batch):
        return mse(model(batch[0]), batch[1], reduction="sum") * 4 / num_items

    report = training.accelerator.check_accumulation(training.model, batches, recipe)
    assert not report.loss_is_mean
    assert report.losses is not None
    assert report.losses.adds_up


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


def test_documented_toy_model_gives_the_documented_gradients():
    report = verify_accumulation()
    assert report, str(report)
    assert len(report.rows) == 9
    assert str(report).count("2.04000") == 3 * 9 + 1


# `notebook-launcher verify`, and what its report says.


def test_command_prints_the_table(capsys):
    assert main(["verify", "--processes", "1", "2", "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "every weight is 2.04000"
    assert shown.count("2.04000") == 2 * 3 + 1


def test_numbers_that_are_none_are_refused_by_name():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps='two' is a str; it must be a whole number"):
        verify_accumulation([2], ["two"])  # type: ignore[list-item]


def test_weight_that_differs_is_marked():
    row: dict[str, Any] = {"num_processes": 2, "gradient_accumulation_steps": 2, "micro_batch": 2, "whole": 2.04}
    good = VerificationRow(accumulated=(2.04, 2.04), by_hand=(2.04, 2.04), **row)
    bad = VerificationRow(accumulated=(2.04, 1.53), by_hand=(2.04, 2.04), **row)
    assert VerificationReport((good,))
    report = VerificationReport((good, bad))
    assert not report
    assert "1.53000..2.04000" in str(report)
    assert str(report).endswith("NOT every weight is 2.04000")
