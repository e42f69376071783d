"""Ranks of a sharded model that have gradients of different parameters are named, before or as they are reduced."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from notebook_launcher import FullyShardedDataParallelPlugin, Session, notebook_launch
from notebook_launcher.training.rank_check.check import Bulletin
from tests.support.toy_training import session_fixture, shards_on_cpus

pytestmark = shards_on_cpus

session = session_fixture(2)
STEPS = 6

# The layers that each rank uses in each step, by rank.
DIFFERENT = {
    "from the start": (["a"] * STEPS, ["b"] * STEPS),
    "later": (["ab"] * 4 + ["a"] * 2, ["ab"] * 4 + ["b"] * 2),
    "in turns": (["a", "b"] * 3, ["b", "a"] * 3),
}
FEWER = {
    "from the start": (["a"] * STEPS, ["ab"] * STEPS),
    "later": (["ab"] * 3 + ["b"] * 3, ["ab"] * STEPS),
    "for one step": (["ab"] * 2 + ["a"] + ["ab"] * 3, ["ab"] * STEPS),
}
SAME = {
    "one after the other": ["a", "b"] * 3,
    "one of two": ["a"] * STEPS,
    "at first": ["a", "a", "ab", "ab", "b", "ab"],
}


class Two(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 2, bias=False)
        self.b = torch.nn.Linear(2, width, bias=False)

    def forward(self, inputs: torch.Tensor, used: str) -> torch.Tensor:
        outputs: list[torch.Tensor] = [getattr(self, name)(inputs).sum() for name in used]
        return torch.stack(outputs).sum()


def train(used: tuple[list[str], list[str]], width: int = 2, num_steps: int = 1, **options: Any) -> list[list[float]]:
    from notebook_launcher import Accelerator, GradientAccumulationPlugin

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps, sync_each_batch=False),
        fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"),
        **options,
    )
    torch.manual_seed(0)
    net: Any = Two(width)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for names in used[accelerator.process_index]:
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(1, 2), names))
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor().flatten().tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("case", DIFFERENT)
def test_gradients_of_different_parameters_are_refused(case, width):
    pattern = re.compile(
        r"backward\(\): rank (0|1) has gradients of (a|b).weight that rank (1|0) has not; rank \3 has gradients of .* "
        r"would be averaged into each other.*find_unused_parameters=True"
    )
    with pytest.raises(RuntimeError, match=pattern):
        notebook_launch(train, 2, args=(DIFFERENT[case], width), devices="cpu", output="none")


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("case", FEWER)
def test_gradients_of_fewer_parameters_are_refused(case, width):
    with pytest.raises(RuntimeError, match=r"rank 1 has gradients of (a|b).weight that rank 0 has not\. "):
        notebook_launch(train, 2, args=(FEWER[case], width), devices="cpu", output="none")


def test_gradients_of_different_parameters_in_one_window_are_refused():
    used = (["ab", "ab", "a", "a"], ["ab", "ab", "b", "b"])
    with pytest.raises(RuntimeError, match=r"rank 1 has gradients of b.weight that rank 0 has not"):
        notebook_launch(train, 2, args=(used, 2, 2), devices="cpu", output="none")


@pytest.mark.parametrize("case", SAME)
def test_ranks_that_use_the_same_parameters_train(session, case):
    first, second = session.run(train, args=((SAME[case], SAME[case]), 5))
    assert first == second


def test_ranks_that_use_the_same_parameters_of_a_window_train(session):
    first, second = session.run(train, args=((["a", "b"] * 2, ["b", "a"] * 2), 5, 2))
    assert first == second


def keep_training(names: tuple[str, str]) -> list[list[float]]:
    """Train a model that the session keeps, with other layers in each call."""
    import __main__
    from notebook_launcher import Accelerator

    if not hasattr(__main__, "kept"):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))
        torch.manual_seed(0)
        __main__.kept = accelerator, accelerator.prepare(Two(5)), accelerator.prepare(Two(5))
    accelerator, *nets = __main__.kept
    for net in nets:
        accelerator.backward(net(torch.ones(1, 2), names[accelerator.process_index]))
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    return [gradient.full_tensor().flatten().tolist() for gradient in gradients]


def test_calls_of_a_session_are_compared_each_by_itself():
    with Session(2, devices="cpu", output="none") as session:
        for names in ("a", "ab", "b"):
            first, second = session.run(keep_training, args=((names, names),))
            assert first == second
        with pytest.raises(RuntimeError, match=r"rank 0 has gradients of a.weight that rank 1 has not\."):
            session.run(keep_training, args=(("ab", "b"),))


def test_ranks_that_compare_nothing_train_on(session):
    first, second = session.run(train, args=(DIFFERENT["from the start"],), kwargs={"check_ranks": False})
    assert first == second


def reduce_without_a_board() -> str:
    """Run as on several machines, whose ranks see nothing of each other's boards."""
    from notebook_launcher.context import current

    context = current()
    assert context is not None
    context.num_nodes = 2
    train(DIFFERENT["from the start"])
    return "trained"


def test_ranks_of_several_machines_are_compared_after_a_reduction():
    with pytest.raises(RuntimeError, match=r"backward\(\): rank (0|1) has gradients of (a|b).weight that rank"):
        notebook_launch(reduce_without_a_board, 2, devices="cpu", output="none")


def count_writes() -> int:
    """Return how often rank 0 writes for its peers in a loop whose gradients are always of the same parameters."""
    written = 0
    write = Bulletin.write

    def counted(self: Bulletin, owner: Any, topic: str, content: Any) -> bool:
        nonlocal written
        written += topic.isdigit()
        return write(self, owner, topic, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bulletin, "write", counted)
        train((["ab"] * STEPS, ["ab"] * STEPS))
        constant = written
        train((["a"] * STEPS, ["a"] * STEPS))
    return 100 * constant + written


def test_loop_that_stays_the_same_writes_at_most_once(session):
    assert session.run(count_writes)[0] == 1
