"""An exchange beside the next forward changes no number: every weight is compared bit for bit, after each window."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from tests.support.overlapped_training import Training, flat
from tests.support.toy_training import make_exchange_group, sessions_fixture

ranks = sessions_fixture(2, set_up=make_exchange_group)
three_ranks = sessions_fixture(3, set_up=make_exchange_group)


class Model(torch.nn.Module):
    """Layers of many kinds: tied, called twice, frozen, used past their module, owned by the outermost module."""

    def __init__(self, *, recurs: bool = True) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.scale = torch.nn.Parameter(torch.ones(6))
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent = torch.nn.LSTM(6, 6, batch_first=True) if recurs else None
        self.past = torch.nn.Linear(6, 6)
        self.tied = torch.nn.Linear(6, 6)
        self.tied.weight = self.inner.weight
        self.frozen = torch.nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.checkpointed = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = torch.tanh(self.inner(self.inner(inputs))) * self.scale
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        if self.recurrent is not None:
            hidden = hidden + self.recurrent(hidden)[0]
        hidden = torch.nn.functional.linear(hidden, self.past.weight, self.past.bias)
        hidden = self.frozen(self.tied(hidden))
        hidden = hidden + checkpoint(self.checkpointed, hidden, use_reentrant=False)
        outputs: torch.Tensor = self.head(self.norm(hidden.mean(1)))
        return outputs


def make_parts(case: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer and scheduler, as a case names them."""
    torch.manual_seed(0)
    model = Model(recurs=case.get("recurs", True))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = getattr(torch.optim, case.get("optimizer", "SGD"))
    options = copy.deepcopy(case.get("options", {"lr": 0.05, "momentum": 0.9}))  # A scheduler writes into a tensor.
    groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": options["lr"] / 2}]
    optimizer = kind(groups if case.get("groups") else trained, **options)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def train(
    case: dict[str, Any], num_windows: int, *, overlaps: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Train for some windows; return all weights and states, the losses, and how often an update waited."""
    from torch.utils.data import DataLoader, TensorDataset

    from notebook_launcher import Accelerator, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(
        bucket_cap_mb=case.get("cap", 1e-4), overlap_with_forward=overlaps, **case.get("ddp", {})
    )
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[handler],
        gradient_accumulation_steps=case.get("steps", 1),
        **{"check_ranks": False, **case.get("accelerator", {})},
    )
    generator = torch.Generator().manual_seed(1)
    number = case.get("samples", 66)
    data = TensorDataset(torch.rand(number, 3, 6, generator=generator), torch.rand(number, 1, generator=generator))
    loader = DataLoader(data, 2, shuffle=False)
    original, optimizer, scheduler = make_parts(case)
    last = list(original.parameters())[-1]
    model, optimizer, scheduler, loader = accelerator.prepare(original, optimizer, scheduler, loader)
    losses, num_waited, windows = [], 0, 0
    while windows < num_windows:
        for number, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                weight = float(1 + number + accelerator.process_index) if case.get("weighted") else None
                accelerator.backward(loss, weight)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    if case.get("clip"):
                        accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    if case.get("clip_of_torch"):
                        torch.nn.utils.clip_grad_norm_(original.parameters(), 0.05)
                    if case.get("clip_value"):
                        accelerator.clip_grad_value_(original.parameters(), 0.01)
                optimizer.step()
                scheduler.step()
                num_waited += accelerator.sync_gradients and last.numel() == 0
                optimizer.zero_grad(**case.get("zero_grad", {}))
            windows += accelerator.sync_gradients
            if windows == num_windows:
                break
    states = [
        value for entry in optimizer.state_dict()["state"].values() for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]  # fmt: skip
    return [*(value.clone() for value in original.state_dict().values()), *states], losses, num_waited


def compare(case: dict[str, Any], most: int) -> list[int]:
    """Train with and without the option, for 1, 2, … windows; return how often updates waited."""
    waited = []
    for num_windows in range(1, most + 1):
        expected, expected_losses, none = train(case, num_windows, overlaps=False)
        found, losses, number = train(case, num_windows, overlaps=True)
        assert len(found) == len(expected)
        assert none == 0
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), f"tensor {at} differs after {num_windows} windows"
        assert torch.equal(torch.stack(losses), torch.stack(expected_losses))
        waited.append(number)
    return waited


CASES: dict[str, dict[str, Any]] = {
    "SGD with momentum": {},
    "one bucket": {"cap": 25},
    "windows of 4, the last not full": {"steps": 4, "samples": 26},
    "AdamW with groups and a scheduler": {"optimizer": "AdamW", "options": {"lr": 0.01}, "groups": True, "steps": 2},
    "a rate in a tensor": {"optimizer": "Adam", "options": {"lr": torch.tensor(0.01), "foreach": False}},
    "foreach": {"optimizer": "AdamW", "options": {"lr": 0.01, "foreach": True}},
    "fused": {"optimizer": "AdamW", "options": {"lr": 0.01, "fused": True}},
    "fp16 hook": {"ddp": {"comm_hook": "fp16"}, "steps": 2},
    "bf16 hook": {"ddp": {"comm_hook": "bf16"}},
    "views of buckets": {"ddp": {"gradient_as_bucket_view": True}, "steps": 2},
    "find_unused_parameters": {"ddp": {"find_unused_parameters": True}, "first_waits": True},
    "static_graph": {"ddp": {"static_graph": True}, "steps": 2},
    "no broadcast of buffers": {"ddp": {"broadcast_buffers": False}},
    "weights by hand": {"weighted": True, "steps": 3, "samples": 26},
    "bf16": {"accelerator": {"mixed_precision": "bf16"}, "recurs": False},  # Some CPUs have no LSTM in bf16.
}
FINISHED: dict[str, dict[str, Any]] = {
    "clipping": {"accelerator": {"max_grad_norm": 0.05}},
    "clip_grad_norm_": {"clip": True, "steps": 2},
    "torch's clip_grad_norm_": {"clip_of_torch": True, "steps": 2},
    "clip_grad_value_": {"clip_value": True},
    "fp16": {"accelerator": {"mixed_precision": "fp16"}, "recurs": False},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_are_the_same_after_each_window(ranks, case):
    first = bool(case.get("first_waits"))
    for waited in ranks.run(2, compare, case, 4):
        assert waited == [first, 1 + first, 2 + first, 3 + first]


@pytest.mark.parametrize("case", FINISHED.values(), ids=FINISHED)
def test_exchange_is_finished_where_step_needs_all_gradients(ranks, case):
    for waited in ranks.run(2, compare, case, 3):
        assert waited == [0, 0, 0]


def test_gradients_that_are_cleared_in_place_are_used_first(ranks):
    for waited in ranks.run(2, compare, {"zero_grad": {"set_to_none": False}}, 3):
        assert waited == [0, 1, 2]


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_optimizers_of_torch_update_part_by_part(ranks, name):
    for waited in ranks.run(2, compare, {"optimizer": name, "options": {"lr": 0.01}}, 3):
        assert waited == [0, 1, 2]


def test_updates_at_which_ranks_compare_their_weights_do_not_wait(ranks):
    for waited in ranks.run(2, compare, {"accelerator": {"check_ranks": True}}, 5):
        assert waited == [0, 0, 1, 1, 2], "the ranks compare at updates 1, 2 and 4"


def test_three_ranks_divide_as_ddp_does(three_ranks):
    for waited in three_ranks.run(3, compare, {"steps": 4}, 4):
        assert waited == [0, 1, 2, 3]


def test_loss_that_is_only_logged_inside_a_window_changes_nothing_and_warns_of_nothing(ranks):
    def train(*, overlaps: bool) -> Any:
        training = Training(overlaps=overlaps, gradient_accumulation_steps=2)
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            for _ in range(8):
                with training.accelerator.accumulate(training.model):
                    training.backward()
                    training.loss().item()
                    training.optimizer.step()
                    training.optimizer.zero_grad()
        return flat([training.weights(), [str(warning.message) for warning in shown]])

    for found, expected in ranks.run(2, lambda: (train(overlaps=True), train(overlaps=False))):
        assert found == expected
        assert found[1] == []
