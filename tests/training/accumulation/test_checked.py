"""`check_accumulation` compares a window with one backward over all of its samples."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from notebook_launcher import ConfigError, VerificationReport, verify_accumulation
from notebook_launcher.command_line.program import main
from notebook_launcher.verification import VerificationRow
from tests.support.toy_windows import Training, mse


def of_sum(model: Any, batch: Any) -> Any:
    return mse(model(batch[0]), batch[1], reduction="sum")


def of_mean(model: Any, batch: Any) -> Any:
    return mse(model(batch[0]), batch[1])


def check(training: Training, sizes: list[int], loss: Any, weight: Any = None) -> Any:
    rows = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    batches = [(training.inputs[begin:end], training.targets[begin:end]) for begin, end in rows]
    return training.accelerator.check_accumulation(training.model, batches, loss, weight=weight)


def test_check_accumulation_finds_the_exact_gradient():
    training = Training(steps=4)
    before = training.model.state_dict()["0.weight"].clone()
    report = check(training, [2, 5], of_mean)
    assert report
    assert str(report).startswith("exact: 2 micro-batches (weight 7)")
    assert report.nominal == 0.5
    assert torch.equal(training.model.state_dict()["0.weight"], before)
    assert training.model[0].weight.grad is None
    assert training.micro_batch(0) is False, "the window that it used is closed"


ADDS_UP = 'Return the sum and pass it as backward(loss, weight=num_tokens, reduction="sum")'


@pytest.mark.parametrize(("sizes", "loss", "weight", "words"), [
    ([1, 7], of_sum, lambda _: 1, ADDS_UP),
    ([1, 2], lambda *of: of_sum(*of) * 4 / 3, None, ADDS_UP),  # Divided by the tokens of the whole window.
    ([1, 3], of_mean, lambda _: 1, "Pass as weight= what the loss is the mean over"),
])  # fmt: skip
def test_check_accumulation_finds_a_loss_that_is_no_mean_over_its_weight(sizes, loss, weight, words):
    report = check(Training(steps=4), sizes, loss, weight)
    assert not report
    assert report.relative < 1e-5, "the gradient is that of what the loss was said to be"
    assert "NOT A MEAN: the loss of two micro-batches joined is" in str(report)
    assert words in str(report)


def test_check_accumulation_does_without_batches_that_cannot_be_joined_but_not_without_any():
    training = Training(steps=2)
    batches = [torch.zeros(2, 3), torch.zeros(2, 5)]
    report = training.accelerator.check_accumulation(
        training.model, batches, lambda model, batch: model(batch[:, :3]).mean()
    )
    assert report
    assert report.losses is None
    with pytest.raises(ValueError, match="gave no micro-batch"):
        check(training, [], of_mean)


def test_documented_toy_model_gives_the_documented_gradients_as_the_command_shows(capsys):
    assert main(["verify", "--processes", "1", "2", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "every weight is 2.04000"
    assert shown.count("2.04000") == 3 * 9 + 1


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
