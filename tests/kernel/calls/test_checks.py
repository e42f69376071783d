"""Errors in a function and its arguments that are found before any process starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from notebook_launcher import (
    ConfigError,
    Session,
    find_executable_batch_size,
    launch,
    notebook_launch,
)
from notebook_launcher.kernel.calls.checks import check_call


def train(lr: float, epochs: int = 1) -> tuple[float, int]:
    return lr, epochs


def spawned(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


@find_executable_batch_size(starting_batch_size=4)
def sized(batch_size: int, lr: float) -> tuple[int, float]:
    return batch_size, lr


def takes_no_arguments(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper() -> Any:
        return function(0.5)

    return wrapper


async def coroutine() -> None:
    pass


def generator() -> Any:
    yield 1


class AsyncModel:
    async def __call__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (None, (), {}, r"fn=None is a NoneType, which cannot be called. Pass the function itself"),
        (3, (), {}, r"fn=3 is an int, which cannot be called"),
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
        (functools.partial(train, 1, 2, 3), (), {}, r"train\(lr.*args=\(1, 2, 3\).*too many positional arguments"),  # type: ignore[call-arg]
        (functools.partial(train, epoch=3), (1,), {}, r"got an unexpected keyword argument 'epoch'"),  # type: ignore[call-arg]
        (train, (1,), {"epoch": 2}, r"got an unexpected keyword argument 'epoch'"),
        (
            spawned,
            (2,),
            {},
            r"remove the parameter rank, and write rank = torch\.distributed\.get_rank\(\) as the function's first",
        ),
        (spawned, (), {}, r"Arguments go by name: notebook_launch\(fn, 2, args="),
        (sized, (), {}, r"sized\(lr: .* missing a required argument: 'lr'"),
        (takes_no_arguments(train), (0.1,), {}, r"train\(\) .*too many positional arguments"),
        (functools.cache(train), (1, 2, 3), {}, r"too many positional arguments"),
        (train, "x", {}, r"args='x' is a str; it must be a tuple. Write args=\('x',\)"),
        (train, 0.1, {}, r"args=0.1 is a float; it must be a tuple. Write args=\(0.1,\)"),
        (train, (), [1], r"kwargs=\[1\] must map the names of arguments to their values"),
        (train, (), {1: 2}, r"kwargs=\{1: 2\} must map the names"),
    ],
)
def test_objects_that_cannot_be_called_are_refused(function: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_call(function, args, kwargs, launcher="notebook_launch(fn, 2")


def test_advice_about_arguments_in_a_session_shows_a_call_of_the_session() -> None:
    session = Session(2, devices="cpu")
    for name in ("run", "launch"):
        with pytest.raises(ConfigError, match=rf"Arguments go by name: session\.{name}\(fn, args=\(\.\.\.\), kwargs="):
            getattr(session, name)(spawned)
    session.close()


@pytest.mark.parametrize(
    ("places", "options", "written"),
    [
        (((0.1,),), {"num_processes": 3}, r"train, 3, args=\(0.1,\)"),
        (((0.1,), 3), {}, r"train, 3, args=\(0.1,\)"),
        (([0.1], 3, "bf16"), {}, r"train, 3, args=\(0.1,\)"),
        ((3, 0.1, 3), {}, r"train, 3, args=\(0.1, 3\)"),
        (("x", "y"), {}, r"train, 2, args=\('x', 'y'\)"),
    ],
)
def test_positional_arguments_of_the_function_get_advice(
    places: tuple[Any, ...], options: dict[str, Any], written: str
) -> None:
    with pytest.raises(ConfigError, match=rf"go by name. Write launch\({written}\)\.$"):
        launch(train, *places, **options)


def test_arguments_given_as_options_get_advice() -> None:
    message = r"unknown option epochs=. train has a parameter of that name, .* write kwargs=\{'epochs': 3\}\."
    with pytest.raises(ConfigError, match=message):
        notebook_launch(train, 2, args=(0.1,), epochs=3)
    with pytest.raises(ConfigError, match=r"unknown option epoch=. help\(LaunchConfig\) lists the options"):
        notebook_launch(train, 2, args=(0.1,), epoch=3)


class Costly:
    """An argument whose repr would copy data from a GPU, or take long."""

    def __repr__(self) -> str:
        raise AssertionError


def test_error_about_arguments_never_asks_them_for_their_repr() -> None:
    with pytest.raises(ConfigError, match=r"args=Costly is a Costly; it must be a tuple\. Write args=\(Costly,\)"):
        check_call(train, Costly(), {}, launcher="notebook_launch(fn, 2")
    with pytest.raises(
        ConfigError, match=r"args=\(\[0, 1, 2, 3, 4, 5, \.\.\.\], Costly\), kwargs=\{'epoch': 2\}: got an"
    ):
        check_call(train, (list(range(10**6)), Costly()), {"epoch": 2}, launcher="notebook_launch(fn, 2")
