"""Objects that cannot travel are refused by name, before anything starts.

The classes and functions of this file stand for a user's.
"""

from __future__ import annotations

import asyncio
import functools
import io
import socket
import sqlite3
import sys
import tempfile
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import ipywidgets
import pytest
import torch
from tqdm import tqdm

from notebook_launcher import Session, travel
from notebook_launcher.errors import CaptureError, ReturnValueError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

lock = threading.Lock()


@pytest.fixture(autouse=True, scope="module")
def _this_module_is_a_notebook() -> Iterator[None]:
    """Definitions of this file travel by value, as a notebook's do."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def helper() -> Any:
    return lock


def train() -> Any:
    return helper()


def with_default(when: Any = lock) -> Any:
    return when


class Trainer:
    def __init__(self) -> None:
        self.logger = SimpleNamespace(name="log", events=[1, {"lock": threading.Lock()}])
        self.itself = self

    def fit(self) -> None: ...


class Guarded:
    def __init__(self) -> None:
        self.mutex = lock


trainer = Trainer()


def nested() -> Any:
    return trainer


def makes_one() -> Any:
    return Guarded()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(1, 1))
        self.block[0].guard = threading.Lock()  # type: ignore[assignment]


def capture(mutex: Any) -> Any:
    def inner() -> Any:
        return mutex

    return inner


class Stubborn:
    def __reduce__(self) -> Any:
        message = "not today"
        raise RuntimeError(message)


EVENTS = r"logger.events\[1\]\['lock'\]`"
CALLS: dict[str, tuple[travel.FunctionCall, str]] = {
    "global": (travel.FunctionCall(helper, (), {}), r"^the function helper captures `lock`, a _thread.lock, "),
    "helper": (travel.FunctionCall(train, (), {}), r"captures `lock`, a _thread.lock \(train -> helper -> lock\)"),
    "default": (travel.FunctionCall(with_default, (), {}), r"default of `when` in with_default is a _thread.lock"),
    "attribute": (travel.FunctionCall(nested, (), {}), rf"^`trainer.{EVENTS} \(captured by nested through `trainer`\)"),
    "method": (travel.FunctionCall(trainer.fit, (), {}), rf"^`self.{EVENTS} \(captured by Trainer.fit through `self`"),
    "of-a-class": (
        travel.FunctionCall(makes_one, (), {}),
        r"the function Guarded.__init__ captures `lock`.*makes_one -> Guarded.__init__",
    ),
    "argument": (travel.FunctionCall(print, ([{"bar": lock}],), {}), r"^`args\[0\]\[0\]\['bar'\]` is a _thread.lock"),
    "keyword": (travel.FunctionCall(print, (), {"f": {1: lock}}), r"^`kwargs\['f'\]\[1\]` is a _thread.lock"),
    "partial": (travel.FunctionCall(functools.partial(print, lock), (), {}), r"^`.*\.args\[0\]` is a _thread.lock"),
    "module": (travel.FunctionCall(print, (Net(),), {}), r"^`args\[0\]\.block\.0\.guard` is a _thread.lock"),
    "closure": (
        travel.FunctionCall(capture(lock), (), {}),
        r"inner captures `mutex`, a _thread.lock.* Create `mutex` inside",
    ),
    "unknown": (
        travel.FunctionCall(print, ({"x": Stubborn()},), {}),
        r"`args\[0\]\['x'\]` is a .*Stubborn, .* \(RuntimeError: not today\) Create",
    ),
    "set": (travel.FunctionCall(print, ({Guarded},), {}), r"the function Guarded.__init__ captures `lock`"),
}


@pytest.mark.usefixtures("no_descriptor_is_left_open")
@pytest.mark.parametrize("name", CALLS)
def test_capture_is_named(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(CaptureError, match=message):
        travel.pack_call(call)


async def _coroutine() -> None: ...


def test_kinds_are_refused_with_advice(tmp_path: Any) -> None:
    loop, coroutine = asyncio.new_event_loop(), _coroutine()
    samples: Any = [1, 2]
    (tmp_path / "f").write_text("x")
    with (
        socket.socket() as sock,
        open(tmp_path / "f") as text,
        open(tmp_path / "f", "rb") as binary,
        tempfile.TemporaryFile() as temporary,
        tqdm(range(3), file=io.StringIO()) as bar,
    ):
        database = sqlite3.connect(":memory:")
        kinds: dict[str, list[Any]] = {
            "open .* inside the function": [text, binary, temporary],
            "Create .* inside the function": [threading.Event(), threading.RLock(), threading.local()],
            "Start .* inside the function": [threading.Thread()],
            "Connect inside the function": [sock, database],
            "Pass a list": [(i for i in range(3))],
            "asyncio.run": [loop, loop.create_future(), coroutine],
            "Create the progress bar inside": [bar],
            "belongs to the notebook page": [ipywidgets.IntSlider()],
            "call iter.. inside the function": [iter(torch.utils.data.DataLoader(samples))],
        }
        for advice, values in kinds.items():
            for value in values:
                with pytest.raises(CaptureError, match=rf"^`args\[0\]` is an? .*{advice}"):
                    travel.pack_call(travel.FunctionCall(print, (value,), {}))
        database.close()
    coroutine.close()
    loop.close()


def test_accelerator_of_the_kernel_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, PartialState

    accelerator = accelerate.Accelerator(cpu=True)
    for value in (accelerator, AcceleratorState(), PartialState()):
        advice = rf"an? accelerate.*{type(value).__name__}.*Create .* inside the function"
        with pytest.raises(CaptureError, match=advice):
            travel.pack_call(travel.FunctionCall(print, (value,), {}))
    AcceleratorState._reset_state(reset_partial_state=True)


def test_session_and_run_of_the_kernel_are_refused_with_what_to_pass_instead() -> None:
    with Session(1, output="none") as session:
        run = session.launch(int)
        run.wait()

        def uses_session() -> Any:
            return session.run(int)

        def uses_run() -> Any:
            return run.result()

        for function, name, advice in (
            (uses_session, "session", "A session belongs to the notebook.*run it there, and pass the values"),
            (uses_run, "run", "A run belongs to the notebook.*take its results there, and pass the values"),
        ):
            with pytest.raises(CaptureError, match=f"^the function .*{function.__name__} captures `{name}`.*{advice}"):
                travel.pack_call(travel.FunctionCall(function, (), {}))


def test_excessive_nesting_is_an_error_and_not_a_crash() -> None:
    value: Any = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(CaptureError, match="excessively deep recursion"):
        travel.pack_call(travel.FunctionCall(print, (value,), {}))


class Holder:
    def __init__(self) -> None:
        self.lock = lock

    def hold(self) -> None:
        self.lock.acquire()


RETURNS: dict[str, tuple[Any, str]] = {
    "dict": ({"ok": 1, "lock": lock}, r"^the return value cannot travel: `result\['lock'\]` is a _thread.lock. Retu"),
    "attribute": (trainer, r"`result.logger.events\[1\]\['lock'\]` is a _thread.lock"),
    "generator": ((i for i in range(3)), r"`result` is a generator. Return a list of the items"),
    "function": (train, r"`lock`, captured by the function helper, is a _thread.lock"),
    "method": ({"close": Holder().hold}, r"`result\['close'\].__self__.lock` is a _thread.lock"),
    "unknown": ([Stubborn()], r"`result\[0\]` is a .*Stubborn. \(RuntimeError: not today\) Return plain data"),
}


@pytest.mark.usefixtures("no_descriptor_is_left_open")
@pytest.mark.parametrize("name", RETURNS)
def test_returned_part_is_named(name: str) -> None:
    value, message = RETURNS[name]
    with pytest.raises(ReturnValueError, match=message):
        travel.pack_value(value)


def test_what_torch_wraps_is_refused_with_the_way_out(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        wrapped = r"^the return value cannot travel: `result\['model'\]` is a torch\..*Return `model.module` or"
        with pytest.raises(ReturnValueError, match=wrapped):
            travel.pack_value({"model": model})
        with pytest.raises(ReturnValueError, match=r"`result\[0\]` is a.*ProcessGroup"):
            travel.pack_value([torch.distributed.group.WORLD])
        assert travel.unpack_value(travel.pack_value(model.module)).weight.shape == (1, 1)
    finally:
        torch.distributed.destroy_process_group()


class Unbuildable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    message = "no such thing here"
    raise OSError(message)


def test_value_that_cannot_be_rebuilt_is_an_error() -> None:
    advice = r"OSError: no such thing here\. Return plain data, or import the class in"
    with pytest.raises(ReturnValueError, match=advice):
        travel.unpack_value(travel.pack_value(Unbuildable()))
