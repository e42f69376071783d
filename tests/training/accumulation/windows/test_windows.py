"""Beginnings and ends of windows, whatever the loop does, on one process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import GradientAccumulationPlugin
from tests.support.toy_training import full_gradient, make_model
from tests.support.toy_windows import Training, mse


def test_gradients_of_a_window_left_by_break_are_dropped():
    training = Training(steps=4)
    for _ in training.loader:
        with training.accelerator.accumulate(training.model):
            training.accelerator.backward(100 * training.loss(0))
        break
    with pytest.warns(UserWarning, match="a window of 4 micro-batches was left after 1"):
        for at, _ in enumerate(training.loader):
            training.backward(at)
            if training.accelerator.sync_gradients:
                break
    training.expect_gradient_of(0, 1, 2, 3)


def test_exception_before_the_backward_takes_the_micro_batch_back():
    training = Training(steps=2)
    with pytest.raises(ZeroDivisionError), training.accelerator.accumulate(training.model):
        _ = 1 / 0
    for row in range(2):
        training.backward(row)
    assert training.accelerator.sync_gradients
    training.expect_gradient_of(0, 1)


def test_exception_inside_the_backward_drops_the_window():
    training = Training(steps=2)

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), training.accelerator.accumulate(training.model):
        loss = training.loss(7)
        hook = training.model[0].bias.register_hook(fail)
        training.accelerator.backward(loss)
    hook.remove()
    with pytest.warns(UserWarning, match="its gradients were dropped"):
        for row in range(2):
            training.backward(row)
    training.expect_gradient_of(0, 1)


@pytest.mark.parametrize(("place", "loader"), [("before", "the same"), ("inside", "the same"), ("inside", "another")])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_evaluation_in_a_loop_of_training_changes_nothing(place, loader, steps):
    def train(place: str | None) -> tuple[list[torch.Tensor], list[bool]]:
        training = Training(steps, num_samples=7, batch_size=2)
        accelerator, ends = training.accelerator, []
        other = accelerator.prepare(DataLoader(TensorDataset(training.inputs), 3))

        def evaluate(where: str) -> None:
            if where == place:
                with torch.no_grad():
                    for inputs, *_ in training.loader if loader == "the same" else other:
                        training.model(inputs)

        for inputs, targets in training.loader:
            evaluate("before")
            with accelerator.accumulate(training.model):
                evaluate("inside")
                accelerator.backward(mse(training.model(inputs), targets))
                training.optimizer.step()
                training.optimizer.zero_grad()
                ends.append(accelerator.sync_gradients)
        return list(training.model.parameters()), ends

    (weights, ends), (expected, expected_ends) = train(place), train(None)
    assert ends == expected_ends
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_windows_may_span_epochs():
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    training = Training(steps=None, num_samples=4, gradient_accumulation_plugin=plugin)
    ends = [training.micro_batch(0) for _ in range(3) for _ in training.loader]
    assert ends == [False, False, True] * 4


def test_two_sets_of_models_have_windows_of_their_own():
    training = Training(steps=2)
    critic = make_model(seed=1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic, optimizer = training.accelerator.prepare(critic, optimizer)
    before = critic[0].weight.clone()
    for row in range(2):
        training.backward(row)
        first = training.accelerator.sync_gradients
        with training.accelerator.accumulate(critic):
            training.accelerator.backward(mse(critic(training.inputs[:1]), training.targets[:1]))
            optimizer.step()
            optimizer.zero_grad()
        assert first == training.accelerator.sync_gradients == (row == 1)
        assert torch.equal(before, critic[0].weight) == (row == 0)
    training.expect_gradient_of(0, 1)


def test_zero_grad_at_the_top_of_the_block_keeps_the_window():
    training = Training(steps=3)
    for row in range(3):
        with training.accelerator.accumulate(training.model):
            training.optimizer.zero_grad()
            training.accelerator.backward(training.loss(row))
    training.expect_gradient_of(0, 1, 2)
    training.optimizer.step()
    with training.accelerator.accumulate(training.model):
        training.optimizer.zero_grad()
        assert training.model[0].weight.grad is None, "the last window's gradients are cleared"


def test_loop_without_accumulate_steps_after_a_window_that_was_left():
    training = Training(steps=1)
    training.accelerator.gradient_accumulation_steps = 4
    for _ in training.loader:
        training.micro_batch(0)
        break
    assert not training.accelerator.sync_gradients
    for _ in training.loader:
        assert training.accelerator.sync_gradients
        break


def test_weight_for_some_micro_batches_only_is_refused():
    training = Training(steps=2)
    training.backward(0, weight=3)
    with pytest.raises(ValueError, match="got no weight= after micro-batches of the same window got one"):
        training.backward(1)


@pytest.mark.parametrize(("loss", "kwargs", "error", "message"), [
    ("vector", {}, ValueError, r"a loss of shape \(2,\): a gradient needs one number. Take loss.mean\(\)"),
    ("text", {}, TypeError, r"backward\(str\): pass the loss, a tensor"),
    ("loss", {"weight": "many"}, TypeError, "weight='many' is not a number"),
    ("loss", {"weight": -1}, ValueError, "weight=-1 must be 0 or more"),
    ("loss", {"reduction": "max"}, ValueError, "reduction='max' is unknown. It can be 'mean', 'sum': how"),
    ("loss", {"reduction": "sum"}, ValueError, "reduction='sum' needs weight="),
    ("complex", {}, RuntimeError, r"a loss of torch.complex64: .* real scalar outputs. Take a real number"),
    ("constant", {}, RuntimeError, "does not require grad"),
])  # fmt: skip
def test_backward_refuses_what_is_not_a_scalar_loss(loss, kwargs, error, message):
    training = Training()
    losses: dict[str, Any] = {
        "vector": torch.ones(2, requires_grad=True), "text": "loss", "loss": training.loss(0),
        "complex": torch.ones((), dtype=torch.complex64, requires_grad=True), "constant": torch.ones(()),
    }  # fmt: skip
    with pytest.raises(error, match=message), training.accelerator.accumulate(training.model):
        training.accelerator.backward(losses[loss], **kwargs)


def test_calls_that_a_window_cannot_take_are_refused():
    training = Training(steps=4)
    with pytest.raises(ValueError, match=r"weight=2\) outside of accumulate\(\) with gradient_accumulation_steps=4"):
        training.accelerator.backward(training.loss(0), weight=2)
    with pytest.raises(TypeError, match=r"accumulate\(str\): expected the models"):
        training.accelerator.accumulate("model")
    with (
        pytest.raises(ValueError, match=r"step\(closure\) in a window of 4 micro-batches"),
        training.accelerator.accumulate(training.model),
    ):
        training.optimizer.step(lambda: training.loss(0))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("is_in_next", [True, False])
def test_clearing_the_model_inside_a_window_is_refused(is_in_next, set_to_none):
    training = Training(steps=3)
    text = r"gradients of 1 earlier micro-batches .* cleared, by model.zero_grad\(\)"
    with training.accelerator.accumulate(training.model):
        training.accelerator.backward(training.loss(0))
        if not is_in_next:
            training.model.zero_grad(set_to_none=set_to_none)
    with pytest.raises(RuntimeError, match=text), training.accelerator.accumulate(training.model):
        if is_in_next:
            training.model.zero_grad(set_to_none=set_to_none)
        training.accelerator.backward(training.loss(1))


@pytest.mark.parametrize(("steps", "num_samples"), [(1, 5), (4, 15), (2, 3)])
def test_two_backwards_in_one_block_add_up_with_a_warning_also_in_a_short_window(steps, num_samples):
    training = Training(steps=steps, num_samples=num_samples, batch_size=3)
    with pytest.warns(UserWarning, match=r"two backwards in one accumulate\(\)"):
        for inputs, targets in training.loader:
            with training.accelerator.accumulate(training.model):
                output = training.model(inputs)
                training.accelerator.backward(mse(output, targets) / 4, retain_graph=True)
                training.accelerator.backward(mse(output, targets) * 3 / 4)
                if training.accelerator.sync_gradients:
                    gathered = training.grads()
                    training.optimizer.zero_grad()
    last = list(range((num_samples - 1) // (3 * steps) * 3 * steps, num_samples))
    expected = full_gradient(training.model.state_dict(), training.inputs[last], training.targets[last])
    torch.testing.assert_close(gathered, expected)


@pytest.mark.parametrize("inner", ["model", "all"])
def test_block_inside_a_block_of_the_same_parameters_is_refused(inner):
    training = Training(steps=2)
    accelerator, model = training.accelerator, training.model
    match = r"accumulate\(.*\) inside a block of accumulate\(.*\): each block is one micro-batch, so this batch would"
    with (
        pytest.raises(RuntimeError, match=match),
        accelerator.accumulate(model),
        accelerator.accumulate(*[model] * (inner == "model")),
    ):
        pytest.fail("the inner block was entered")
    training.micro_batch(0)
    training.micro_batch(1)
    assert accelerator.sync_gradients


@pytest.mark.parametrize("place", ["in a block", "between two"])
def test_weights_that_change_inside_a_window_warn(place):
    training = Training(steps=4)
    raw = torch.optim.SGD(training.model.parameters(), lr=0.1)
    with training.accelerator.accumulate(training.model):
        training.accelerator.backward(training.loss(0))
        if place == "in a block":
            raw.step()
    if place == "between two":
        raw.step()
    with pytest.warns(UserWarning, match="the weights changed inside a window"):
        training.micro_batch(1)


@pytest.mark.parametrize(("begun", "text"), [
    (0, r"a window began with gradients that its models had already.* through it: critic\.requires_grad_\(False\)"),
    (1, r"gradients were changed between two micro-.*: critic\.requires_grad_\(False\), and True"),
])  # fmt: skip
def test_gradients_of_another_loss_warn(begun, text):
    """At a window's begin, or inside it, as a generator's loss through its discriminator leaves them."""
    training = Training(steps=4)
    critic = training.model
    for _ in range(begun):
        training.micro_batch(0)
    (-100 * training.loss(0)).backward()
    with pytest.warns(UserWarning, match=text):
        training.micro_batch(1)
    assert critic is training.model


@pytest.mark.parametrize("clears", ["after the step", "at the top", "everywhere"])
@pytest.mark.parametrize("steps_always", [False, True])
@pytest.mark.parametrize("steps", [2, 4])
def test_clearing_inside_a_window_keeps_what_backwards_of_torch_alone_have_added(clears, steps_always, steps):
    training = Training(steps=steps)
    weight = next(training.model.parameters())
    with pytest.warns(UserWarning, match=r"called no accelerator.backward\(loss\)"):
        for number in range(8):
            with training.accelerator.accumulate(training.model):
                if clears != "after the step":
                    training.optimizer.zero_grad()
                (training.loss(number) / steps).backward()
                if training.accelerator.sync_gradients:
                    losses = torch.stack([training.loss(each) for each in range(number - steps + 1, number + 1)])
                    (expected,) = torch.autograd.grad(losses.mean(), weight)
                    torch.testing.assert_close(weight.grad, expected)
                if training.accelerator.sync_gradients or steps_always:
                    training.optimizer.step()
                if clears != "at the top":
                    training.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:a micro-batch of accumulate")
def test_backward_of_torch_keeps_no_gradients_of_another_model():
    training = Training(steps=2)
    other = torch.nn.Linear(1, 1)
    other, optimizer = training.accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with training.accelerator.accumulate(training.model):
        (training.loss(0) / 2 + other(torch.ones(1, 1)).sum()).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        optimizer.zero_grad()
    assert next(training.model.parameters()).grad is not None
    assert next(other.parameters()).grad is None


def test_two_accelerators_share_no_state():
    first, second = Training(steps=4), Training(steps=1, mixed_precision="bf16")
    assert (first.micro_batch(0), second.micro_batch(0), first.accelerator.sync_gradients) == (False, True, False)
    assert (first.accelerator.mixed_precision, second.accelerator.mixed_precision) == ("no", "bf16")


def test_steps_set_inside_a_window_hold_from_the_next_on():
    training = Training(steps=2)
    ends = [training.micro_batch(0)]
    training.accelerator.gradient_accumulation_steps = 3
    ends += [training.micro_batch(row) for row in range(1, 8)]
    assert ends == [False, True, False, False, True, False, False, True]


def test_two_open_windows_are_saved_and_restored(tmp_path):
    def start() -> tuple[Training, Any, Any]:
        training = Training(steps=4)
        critic = make_model(seed=1)
        return training, *training.accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))

    def micro_batch(training: Training, critic: Any, optimizer: Any, row: int) -> None:
        training.micro_batch(row)
        for _ in range(2):  # so that its window is another number of micro-batches in
            with training.accelerator.accumulate(critic):
                training.accelerator.backward(mse(critic(training.inputs[[row]]), training.targets[[row]]))
                optimizer.step()
                optimizer.zero_grad()

    through, resumed = start(), start()
    for row in range(5):
        micro_batch(*through, row)
        if row == 4:
            through[0].accelerator.save_state(tmp_path / "state")
    resumed[0].accelerator.load_state(tmp_path / "state")
    resumed[0].optimizer.zero_grad()  # drops nothing that was loaded
    for row in range(5, 8):
        micro_batch(*through, row)
        micro_batch(*resumed, row)
    for one, other in zip(through[:2], resumed[:2], strict=True):
        models = (part.model if isinstance(part, Training) else part for part in (one, other))
        torch.testing.assert_close(*(model.state_dict() for model in models), rtol=0, atol=0)


def test_copy_of_a_state_hears_of_the_loops_over_the_copies_of_its_loaders():
    training = Training(steps=2)
    original = training.accelerator.gradient_state
    state, loader = pickle.loads(pickle.dumps((original, training.loader)))
    assert loader.gradient_state is state is not original
    assert len(list(loader)) > 1
    assert (state.loops.was_read_ahead, original.loops.was_read_ahead) == (True, False)
    for _ in loader:
        assert (state.loops.was_read_ahead, state.active_dataloader) == (False, loader)
    assert not original.in_dataloader
