"""What is found wrong with a function and its arguments before any process starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from notebook_launcher import CallOrderError, ConfigError, LaunchConfig, context
from notebook_launcher.kernel.checks import check_call, check_not_in_rank, name_of


def train(lr: float, epochs: int = 1) -> tuple[float, int]:
    return lr, epochs


async def coroutine() -> None:
    pass


def generator() -> Any:
    yield 1


class Model:
    def fit(self, lr: float) -> float:
        return lr

    def __call__(self, lr: float) -> float:
        return lr


class AsyncModel:
    async def __call__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (None, (), {}, r"fn=None is a NoneType, not something that can be called. Pass the function itself"),
        (3, (), {}, r"fn=3 is a int, not something that can be called"),
        (coroutine, (), {}, r"coroutine is a coroutine function \(async def\).*asyncio.run\(coroutine\(\)\)"),
        (functools.partial(coroutine), (), {}, r"coroutine is a coroutine function"),
        (AsyncModel(), (), {}, r"AsyncModel is a coroutine function"),
        (generator, (), {}, r"generator is a generator function \(it has a yield\)"),
        (
            train,
            (),
            {},
            r"train\(lr.*\) .*cannot be called with args=\(\), kwargs=\{\}: missing a required argument: 'lr'",
        ),
        (train, (1, 2, 3), {}, r"too many positional arguments"),
        (train, (1,), {"epoch": 2}, r"got an unexpected keyword argument 'epoch'"),
        (train, "x", {}, r"args='x' is a str; it must be a tuple. Write args=\('x',\)"),
        (train, 0.1, {}, r"args=0.1 is a float; it must be a tuple. Write args=\(0.1,\)"),
        (train, (), [1], r"kwargs=\[1\] must map the names of arguments to their values"),
        (train, (), {1: 2}, r"kwargs=\{1: 2\} must map the names"),
    ],
)
def test_what_cannot_be_called_is_refused(function: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_call(function, args, kwargs)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Model, ()),
        (Model().fit, (0.1,)),
        (Model(), (0.1,)),
        (functools.partial(train, 0.1), ()),
        (lambda: 1, ()),
        (print, ("x",)),
        (dict, ()),
    ],
)
def test_every_kind_of_callable_passes(function: Any, args: tuple[Any, ...]) -> None:
    assert check_call(function, args, None) == (args, {})


def test_names() -> None:
    assert name_of(functools.partial(functools.partial(train, 1))) == "train"
    assert name_of(Model().fit) == "Model.fit"
    assert name_of(Model()) == "Model"


def test_a_rank_cannot_launch() -> None:
    rank = context.RankContext(
        rank=1,
        num_processes=2,
        pid=0,
        settings=LaunchConfig().training_settings(),
        send=lambda _record: None,
        board=bytearray(context.BOARD_SIZE),
        rendezvous=None,
    )
    context.enter(rank)
    try:
        with pytest.raises(CallOrderError, match=r"launch was called inside rank 1, which is itself part of a launch"):
            check_not_in_rank("launch")
    finally:
        context.enter(None)
