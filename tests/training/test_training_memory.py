"""Running out of memory: what counts as that, what is freed, and how ranks try again together."""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher import notebook_launch
from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.device_memory import find_executable_batch_size, should_reduce_batch_size

TOO_MUCH = 2**60
"""Bytes that no machine has: asking for them fails at once."""


def exhaust() -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


@pytest.mark.parametrize("allocate", [exhaust, lambda: np.empty(TOO_MUCH, dtype=np.uint8), lambda: bytearray(TOO_MUCH)])
def test_machine_s_lack_of_memory_is_recognised(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert should_reduce_batch_size(caught.value)


def test_gpu_s_lack_of_memory_is_recognised():
    errors = [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("two", "out of memory"),
    ]
    assert [error for error in errors if not should_reduce_batch_size(error)] == []


def test_failed_attempt_leaves_nothing_in_memory():
    attempts: list[Any] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(size):
        batch = torch.ones(size)
        assert [seen() for seen in attempts] == [None] * len(attempts)
        attempts.append(weakref.ref(batch))
        if size > 1:
            exhaust()

    train()
    assert len(attempts) == 2


def fits_up_to(limit: int, *, memory: list[int]) -> Any:
    def train(batch_size, *args, **kwargs):
        memory.append(batch_size)
        if batch_size > limit:
            exhaust()
        return batch_size, args, kwargs

    return train


def test_size_falls_by_a_tenth_until_it_fits_and_the_next_call_starts_there():
    sizes: list[int] = []
    train = find_executable_batch_size(starting_batch_size=10)(fits_up_to(8, memory=sizes))
    assert train("a", b=1) == (8, ("a",), {"b": 1})
    assert train() == (8, (), {})
    assert sizes == [10, 9, 8, 8]
    sizes.clear()
    find_executable_batch_size(fits_up_to(20, memory=sizes))()
    assert sizes == [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32, 28, 25, 22, 19]  # as with Accelerate
    sizes.clear()
    halves = iter([8, 4, 2])
    find_executable_batch_size(fits_up_to(2, memory=sizes), 16, lambda: next(halves))()
    assert sizes == [16, 8, 4, 2]


@pytest.mark.parametrize("start", [0, 4])
def test_search_raises_when_no_batch_size_fits(start):
    sizes: list[int] = []
    train = find_executable_batch_size(fits_up_to(0, memory=sizes), starting_batch_size=start)
    words = r"No executable batch size found, reached zero\. Not even a batch of 1 fits .*, tried from \d+ down\."
    with pytest.raises(RuntimeError, match=words):
        train()
    assert sizes == list(range(start, 0, -1))


def test_search_that_would_not_end_and_a_call_that_does_not_fit_are_refused():
    train = find_executable_batch_size(fits_up_to(0, memory=[]), 4, lambda: 4)
    with pytest.raises(ValueError, match=r"returned 4 after a batch size of 4 had not fitted\. It must return"):
        train()
    with pytest.raises(TypeError, match=r"with the batch size and 2 more arguments \(too many.*call <lambda>\(lr\)"):
        find_executable_batch_size(lambda size, lr: None)(128, 0.1)


@pytest.mark.parametrize(("steps", "reduce", "expected"), [
    (2, None, [(12, 2), (8, 3), (6, 4), (4, 6)]), (1, None, [(12, 1), (6, 2), (4, 3)]),
    (1, [5, 4], [(12, 1), (5, 3), (4, 3)]),
])  # fmt: skip
def test_accelerator_keeps_the_global_batch(steps, reduce, expected):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    reductions, found = iter(reduce or []), []

    def train(size):
        found.append((size, accelerator.gradient_accumulation_steps))
        if size > 4:
            exhaust()

    following = (lambda: next(reductions)) if reduce else None
    search = find_executable_batch_size(train, 12, following, accelerator=accelerator)
    search()
    assert found == expected
    search()
    assert found == [*expected, expected[-1]]


# Ranks. Every rank trains a DDP model in small buckets, and the culprit runs out of memory in its third step:
# somewhere the others wait for it, or have waited already.


def training(where: str, culprits: set[int], kept: list[Any]) -> Any:
    def train(size):
        rank = dist.get_rank()
        shortage = size > 3 and rank in culprits
        torch.manual_seed(0)
        layers: Any = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        model = DistributedDataParallel(layers, bucket_cap_mb=0.001)
        if where == "model kept":
            kept.append(model)
        if where == "in backward" and shortage:
            layers[1].weight.register_hook(lambda _: exhaust())
        for step in range(4):
            if shortage and step == 2 and where in ("in forward", "model kept"):
                exhaust()
            if step == 2 and where == "before a barrier":
                if shortage:
                    exhaust()
                dist.barrier()
            model(torch.full((size, 16), float(rank))).sum().backward()
        if shortage and where == "at the end":
            exhaust()
        return size, layers[0].weight.grad.sum().item()

    return train


def search(where: str, culprits: set[int]) -> Any:
    sizes: list[int] = []
    kept: list[Any] = []
    train = training(where, culprits, kept)

    @find_executable_batch_size(starting_batch_size=4)
    def recorded(size):
        sizes.append(size)
        return train(size)

    result = recorded()
    undisturbed = training("nowhere", set(), [])(3)
    return sizes, result == undisturbed, result[0]


def add() -> tuple[int, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.getpid(), total.item()


@pytest.mark.parametrize(("where", "culprits", "num_ranks"), [
    ("before a barrier", {0}, 2), ("at the end", {0, 1}, 2), ("model kept", {0}, 2), ("in backward", {0, 2}, 3),
    ("in forward", {1}, 2),
])  # fmt: skip
def test_ranks_try_again_together_and_their_session_goes_on(ranks, where, culprits, num_ranks):
    before = ranks.run(num_ranks, add)
    assert ranks.run(num_ranks, search, where, culprits) == [([4, 3], True, 3)] * num_ranks
    assert ranks.run(num_ranks, add) == before


def test_ranks_end_with_one_size_or_raise_together(ranks):
    def work():
        sizes = []

        @find_executable_batch_size(starting_batch_size=16)
        def train(size):
            sizes.append(size)
            if size > (12, 10)[dist.get_rank()]:
                exhaust()
            dist.barrier()
            return size

        found = [train(), train(), sizes]
        of_rank_0 = find_executable_batch_size(fits_up_to(5, memory=[]), 16, lambda: 5 - dist.get_rank())
        found.append(of_rank_0()[0])
        with pytest.raises(RuntimeError, match="reached zero"):
            find_executable_batch_size(fits_up_to(0, memory=[]), 2)()
        return found

    assert ranks.run(2, work) == [[10, 10, [16, 14, 12, 10, 10], 5]] * 2


def test_group_and_model_from_outside_are_warned_of_and_refused_afterwards():
    def work():
        held, model = dist.group.WORLD, DistributedDataParallel(torch.nn.Linear(1, 1))

        @find_executable_batch_size(starting_batch_size=2)
        def train(size):
            if size > 1:
                exhaust()
            with pytest.raises(RuntimeError, match="Create and prepare the model inside the function"):
                model(torch.ones(1, 1))
            return held is dist.group.WORLD

        with pytest.warns(UserWarning, match="still refers to the process group"):
            return train()

    assert list(notebook_launch(work, 2, output="none", timeout=30)) == [False, False]


def test_accelerator_s_models_do_not_stand_in_the_way(ranks):
    def work():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)

        @find_executable_batch_size(starting_batch_size=4, accelerator=accelerator)
        def train(size):
            accelerator.free_memory()
            torch.manual_seed(0)
            model = torch.nn.Linear(1, 1, bias=False)
            samples: Any = torch.arange(16.0)[:, None]
            data: Any = torch.utils.data.DataLoader(samples, batch_size=size)
            model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), data)
            for batch in data:
                with accelerator.accumulate(model):
                    if size > 2 and accelerator.process_index == 1:
                        exhaust()
                    accelerator.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            return size, accelerator.gradient_accumulation_steps, next(model.parameters()).item()

        shrunk = train()
        undisturbed = find_executable_batch_size(train.__wrapped__, 2, accelerator=accelerator)()
        return shrunk, undisturbed

    for shrunk, undisturbed in ranks.run(2, work):
        assert shrunk == undisturbed
        assert shrunk[:2] == (2, 2)
