"""Whatever holds the prepared parameters may be given to `accumulate`: updates are those of the full batch."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator
from tests.support.toy_training import make_data, make_model, sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Callable

ONE_MODEL: dict[str, Callable[[Any], list[Any]]] = {
    "prepared": lambda our: our.prepared,
    "compiled": lambda our: [our.compiled],
    "container": lambda our: [torch.nn.ModuleList(our.prepared)],
    "new container": lambda our: [torch.nn.ModuleList(our.prepared)],
    "own module": lambda our: [our.module],
    ".module": lambda our: [getattr(our.prepared[0], "module", our.prepared[0])],
    "old name": lambda our: our.parts,
    "part": lambda our: [next(our.parts[0].children())],
    "none": lambda our: [],
    "list": lambda our: [our.prepared],
    "optimizer": lambda our: [our.optimizer],
    "changing": lambda our: [our.prepared, our.parts, []][our.at % 3],
}
TWO_MODELS: dict[str, Callable[[Any], list[Any]]] = {
    "both": lambda our: our.prepared,
    "both contained": lambda our: [torch.nn.ModuleDict({"left": our.prepared[0], "right": our.prepared[1]})],
    "both old names": lambda our: our.parts,
    "none": lambda our: [],
    "one optimizer": lambda our: [our.optimizer],
}
"""By a name for what holds the models: the arguments of `accumulate`."""
NEW_EACH_TIME = "new container", "changing"


class Pair(torch.nn.Module):
    """Two models whose outputs add up, with their first layer in common or not."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.left = make_model(seed=0)
        self.right = make_model(seed=1)
        if shared:
            self.right[0] = self.left[0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.left(inputs) + self.right(inputs)
        return outputs


class Own(torch.nn.Module):
    """A user's own module around a prepared model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.model(inputs)
        return outputs


ranks = sessions_fixture(1, 2, 3)


def plain_updates(net: torch.nn.Module, options: dict[str, Any]) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if options["schedule"] else None
    return optimizer, scheduler


def train(models: str, wrapping: str, options: dict[str, Any]) -> list[Any]:
    """Train for an epoch in a rank; return, for each update, what was seen, the gradients and the new weights."""
    net: Any = make_model() if models == "one" else Pair(shared=models == "shared")
    parts = [net] if models == "one" else [net.left, net.right]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options["steps"], even_batches=False)
    plain, scheduler = plain_updates(net, options)
    prepared = [accelerator.prepare_model(part) for part in parts]
    loader = DataLoader(TensorDataset(*make_data(options["num_samples"])), options["batch_size"])
    optimizer, loader = accelerator.prepare(plain, loader)
    scheduler = scheduler and accelerator.prepare(scheduler)
    compiled = torch.compile(prepared[0], backend="eager") if wrapping == "compiled" else None
    our = types.SimpleNamespace(
        prepared=prepared, parts=parts, optimizer=optimizer, compiled=compiled, module=Own(prepared[0]), at=0
    )
    targets_of = (ONE_MODEL if models == "one" else TWO_MODELS)[wrapping]
    targets = targets_of(our)
    call = {"own module": our.module, "compiled": compiled}.get(wrapping, prepared[0])
    updates, seen = [], []
    for our.at, (inputs, wanted) in enumerate(loader):
        if wrapping in NEW_EACH_TIME:
            targets = targets_of(our)
        with accelerator.accumulate(*targets):
            output = call(inputs) + (prepared[1](inputs) if len(prepared) > 1 else 0)
            loss = torch.nn.functional.mse_loss(output, wanted)
            accelerator.backward(loss, weight=len(inputs) if options["weighted"] else None)
            if loader.current_round.weights[accelerator.process_index]:
                seen.append((inputs, wanted))
            ends = accelerator.sync_gradients
            grads = [parameter.grad.clone() for parameter in net.parameters()]
            if options["clip"]:
                accelerator.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        if ends:
            updates.append((seen, grads, [parameter.detach().clone() for parameter in net.parameters()]))
            seen = []
    assert not seen, "the last window was left open"
    return updates


def assert_close(mine: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    difference = max(float((one - other).detach().abs().max()) for one, other in zip(mine, expected, strict=True))
    assert difference < 1e-6, f"{what} differ by {difference:.1e}"


def check(models: str, results: list[Any], options: dict[str, Any]) -> None:
    """Compare all updates of all ranks with those of one process that sees each window as one batch."""
    net: Any = make_model() if models == "one" else Pair(shared=models == "shared")
    optimizer, scheduler = plain_updates(net, options)
    num_seen = 0
    for number, update in enumerate(zip(*results, strict=True)):
        inputs, wanted = (
            torch.cat(column) for column in zip(*(pair for rank in update for pair in rank[0]), strict=True)
        )
        num_seen += len(inputs)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), wanted).backward()
        full = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        if options["clip"]:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for rank, (_, grads, weights) in enumerate(update):
            assert_close(grads, full, f"gradients of update {number} on rank {rank}")
            assert_close(weights, list(net.parameters()), f"weights after update {number} on rank {rank}")
    assert num_seen == options["num_samples"], "each sample counts once"


OPTIONS = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 4),
        "num_samples": st.integers(2, 17),
        "batch_size": st.integers(1, 3),
        "weighted": st.booleans(),
        "clip": st.booleans(),
        "schedule": st.booleans(),
    }
)
SHORT_TAIL = {"steps": 4, "num_samples": 11, "batch_size": 2, "weighted": False, "clip": True, "schedule": True}
CASES = st.one_of(
    st.tuples(st.just("one"), st.sampled_from(list(ONE_MODEL))),
    st.tuples(st.sampled_from(["two", "shared"]), st.sampled_from(list(TWO_MODELS))),
)


@settings(max_examples=18, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES, num_ranks=st.integers(1, 3), options=OPTIONS)
def test_updates_are_those_of_the_full_batch_whatever_accumulate_is_given(ranks, case, num_ranks, options):
    models, wrapping = case
    check(models, ranks.run(num_ranks, train, models, wrapping, options), options)


def test_each_wrapping_is_exact_with_a_short_last_window(ranks):
    cases = [*(("one", name) for name in ONE_MODEL), *(("shared", name) for name in TWO_MODELS)]
    results = ranks.run(2, lambda: [train(*case, SHORT_TAIL) for case in cases])
    for (models, _), found in zip(cases, zip(*results, strict=True), strict=True):
        check(models, list(found), SHORT_TAIL)
