"""Calls for all ranks that only the main process makes: a line says so, and nothing fails that is merely slow."""

from __future__ import annotations

import contextlib
import io
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import RankFailedError, notebook_launch
from notebook_launcher.context import WAITING, current
from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.process import arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def save(folder: Path) -> Any:
    return Accelerator(cpu=True).save_state(folder).name


def iterate(_folder: Path) -> Any:
    data: Any = range(4)
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(data))
    return [batch.item() for batch in loader]


@contextlib.contextmanager
def impatient(notice_after: float) -> Iterator[None]:
    """Let this rank print its notice so soon, until the end of the block; the session keeps the rank's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "NOTICE_AFTER", notice_after)
        yield


def stand_in_for_a_slow_rank(call: Callable[[Path], Any], folder: Path) -> tuple[str, Any]:
    """Call it on rank 0, and on the others once rank 0 has said that it waits; return what it said."""
    said = folder.parent / "said"
    if torch.distributed.get_rank() == 0:
        with said.open("w") as file, contextlib.redirect_stderr(file), impatient(0.1):
            result = call(folder)
    else:
        while not (said.exists() and said.read_text()):
            time.sleep(0.01)
        result = call(folder)
    return said.read_text(), result


@pytest.mark.parametrize(
    ("call", "name", "results"), [(save, "save_state", ["a", "a"]), (iterate, "iter(loader)", [[0, 2], [1, 3]])]
)
def test_waiting_rank_prints_absent_ranks_and_continues_to_wait(ranks, tmp_path, call, name, results):
    folder = tmp_path / "a"
    ranks.run(2, save, folder)
    outcomes = ranks.run(2, stand_in_for_a_slow_rank, call, folder)
    assert [result for _, result in outcomes] == results
    said = outcomes[0][0]
    assert said.count("\n") == 1
    assert said.startswith(f"{name} waits for rank 1: every rank must call it, not inside `if accelerator.is_main_")


def test_rank_that_waits_in_vain_fails_right_after_its_notice(tmp_path):
    def only_on_the_main_process() -> None:
        accelerator = Accelerator(cpu=True)
        if accelerator.is_main_process:
            with impatient(0.1):
                accelerator.save_state(tmp_path / "a")

    with pytest.raises(RankFailedError, match="rank 1 has returned; rank 0 still waited in save_state"):
        notebook_launch(only_on_the_main_process, 2, output="none")


def evaluate_on_the_main_process(ends_with_it: bool) -> Any:
    """Train a model with buffers, and evaluate it on rank 0, before or after its peer has returned."""
    accelerator = Accelerator(cpu=True)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    data: Any = torch.rand(8, 2)
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=4)
    )
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().sum())
                optimizer.step()
        if ends_with_it and not accelerator.is_main_process:
            return True
        if accelerator.is_main_process:
            with torch.no_grad():
                found = model.eval()(data)
            return torch.equal(found, accelerator.unwrap_model(model)(data))
    return None


def test_evaluation_on_one_rank_is_an_error_that_names_it_unless_the_others_have_returned() -> None:
    """DDP's first forward after training shares buffers, which would pair with what the other ranks do next."""
    assert list(notebook_launch(evaluate_on_the_main_process, 2, args=(True,), output="none")) == [True, True]
    words = r"in a forward of the prepared model without gradients.* call accelerator\.unwrap_model\(model\) there"
    with pytest.raises(RuntimeError, match=words):
        notebook_launch(evaluate_on_the_main_process, 2, args=(False,), output="none")


def test_run_after_a_failure_on_one_rank_waits_for_nobody(ranks: Any, tmp_path: Path) -> None:
    def fail_on_rank_1(folder: Path) -> Any:
        if torch.distributed.get_rank() == 1:
            raise ValueError("before its call")
        return iterate(folder)

    def iterate_again(folder: Path) -> tuple[Any, str]:
        with contextlib.redirect_stderr(io.StringIO()) as said, impatient(0.5):
            result = iterate(folder)
        return result, said.getvalue()

    with pytest.raises(ValueError, match="before its call"):
        ranks.run(2, fail_on_rank_1, tmp_path)
    assert list(ranks.run(2, iterate_again, tmp_path)) == [([0, 2], ""), ([1, 3], "")]


class QueuedWork:
    """Work of a GPU, which is done once rank 0 says so."""

    def query(self) -> bool:
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        return bool(store.check(["the GPU is done"]))


def test_rank_counts_as_waiting_once_its_gpu_waits_for_nobody_any_more(ranks: Any) -> None:
    def look() -> list[list[int]]:
        accelerator = Accelerator(cpu=True)
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        if accelerator.process_index == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(arrivals, "mark_queued_work", QueuedWork)
                accelerator.wait_for_everyone()
            return []
        context: Any = current()
        while not store.add(arrivals._key("wait_for_everyone", 1), 0):
            time.sleep(0.001)
        seen = [context.peers_in(WAITING) for _ in range(100)]
        store.set("the GPU is done", "1")
        while not context.peers_in(WAITING):
            time.sleep(0.001)
        accelerator.wait_for_everyone()
        return seen

    assert ranks.run(2, look)[0] == [[]] * 100
