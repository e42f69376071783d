"""What a call needs of the kernel's imports, by its code: the fork server imports it before the first ranks."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from notebook_launcher import Accelerator, notebook_launch
from notebook_launcher.engines.fork_server_handle import fork_server
from notebook_launcher.engines.kernel_imports import ACCELERATOR, COMPILER, modules_needed
from notebook_launcher.travel import FunctionCall

Wrapped = torch.nn.parallel.DistributedDataParallel


def make_optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def import_inside():
    from torch.optim import AdamW

    return AdamW


def call_a_helper():
    return [make_optimizer() for _ in range(2)]


def use_another_name(model):
    return Wrapped(model)


def call_what_is_given(loop):
    return loop()


def add():
    return torch.ones(2).sum() + torch.nn.functional.relu(torch.ones(1))


class Trainer:
    def train(self):
        return make_optimizer()


class Adder:
    def run(self):
        return add()


def import_our_accelerator():
    from notebook_launcher import Accelerator

    return Accelerator


@pytest.mark.parametrize(
    ("fn", "args", "needs"),
    [
        (make_optimizer, (), {COMPILER}),
        (import_inside, (), {COMPILER}),
        (call_a_helper, (), {COMPILER}),
        (use_another_name, (None,), {COMPILER}),
        (functools.partial(call_what_is_given, make_optimizer), (), {COMPILER}),
        (functools.partial(call_what_is_given, loop=make_optimizer), (), {COMPILER}),
        (call_what_is_given, (make_optimizer,), {COMPILER}),
        (lambda: [call_a_helper() for _ in range(2)], (), {COMPILER}),
        (Trainer().train, (), {COMPILER}),
        (lambda: [Accelerator() for _ in range(2)], (), {ACCELERATOR, COMPILER}),
        (import_our_accelerator, (), {ACCELERATOR, COMPILER}),
        (lambda: Adder().run(), (), set()),
        (add, (), set()),
        (call_what_is_given, (add,), set()),
        (functools.partial(max, 1, 2), (), set()),
        (print, ([1, 2],), set()),
    ],
)
def test_names_of_a_call_tell_what_it_needs(fn, args, needs):
    assert {COMPILER, ACCELERATOR}.intersection(modules_needed(FunctionCall(fn, args, {}))) == needs


def has_compiler_at_first():
    return "torch._dynamo" in sys.modules, make_optimizer is None


def test_ranks_of_a_first_call_that_trains_find_the_compiler_imported():
    fork_server().stop()
    assert notebook_launch(has_compiler_at_first, 2, devices="cpu", output="none")[:] == [(True, False)] * 2
