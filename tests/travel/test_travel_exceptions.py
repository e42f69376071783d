"""Exceptions arrive as their own type, whatever their constructor asks for."""

# ruff: noqa: N818 - the classes stand for the user's

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_launcher import travel


def there_and_back(exc: BaseException) -> BaseException | None:
    before = set(Path("/proc/self/fd").iterdir())
    fd = travel.pack_exception(exc)
    assert fd is not None
    arrived = travel.unpack_exception(fd)
    assert set(Path("/proc/self/fd").iterdir()) == before
    return arrived


class Demanding(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class KeywordOnly(ValueError):
    def __init__(self, *, reason: str) -> None:
        super().__init__(f"because {reason}")
        self.reason = reason


class FileTrouble(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "missing", path)
        self.path = path


class Exit(SystemExit):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(code)
        self.why = why


class Slotted(Exception):
    __slots__ = ("__hidden", "code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = self.__hidden = code


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    more: list[int] = dataclasses.field(default_factory=list)


class OwnReduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b

    def __reduce__(self) -> Any:
        return OwnReduce, (self.args[0], self.b + 1)


def made_inside(a: int, b: int) -> Exception:
    class Local(Exception):
        def __init__(self) -> None:
            super().__init__(a)
            self.b = b

    return Local()


EXCEPTIONS: dict[str, tuple[BaseException, dict[str, Any]]] = {
    "plain": (ValueError("boom", 3), {}),
    "key": (KeyError("k"), {}),
    "exit": (SystemExit(3), {"code": 3}),
    "interrupt": (KeyboardInterrupt(), {}),
    "stop": (StopIteration(5), {"value": 5}),
    "os": (FileNotFoundError(2, "missing", "/x"), {"errno": 2, "filename": "/x"}),
    "import": (ImportError("no", name="m", path="p"), {"name": "m", "path": "p"}),
    "unicode": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {"start": 0, "reason": "bad"}),
    "syntax": (SyntaxError("bad", ("f.py", 1, 2, "x y")), {"lineno": 1, "text": "x y"}),
    "json": (json.JSONDecodeError("bad", "{", 1), {"pos": 1}),
    "torch": (torch.OutOfMemoryError("CUDA out of memory"), {}),
    "demanding": (Demanding(7, "text"), {"code": 7}),
    "keyword-only": (KeywordOnly(reason="x"), {"reason": "x"}),
    "os-subclass": (FileTrouble("/y"), {"errno": 2, "filename": "/y", "path": "/y"}),
    "exit-subclass": (Exit(4, "done"), {"code": 4, "why": "done"}),
    "slots": (Slotted(5), {"code": 5, "_Slotted__hidden": 5}),
    "frozen": (Frozen(6, [1]), {"code": 6, "more": [1]}),
    "local": (made_inside(1, 2), {"b": 2}),
    "own-reduce": (OwnReduce(1, 2), {"b": 3}),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_arrive_as_they_left(name: str) -> None:
    exc, attributes = EXCEPTIONS[name]
    arrived = there_and_back(exc)
    assert type(arrived) is type(exc)
    assert (arrived.args, str(arrived)) == (exc.args, str(exc))
    assert {attribute: getattr(arrived, attribute) for attribute in attributes} == attributes


def test_traceback_and_the_chain_stay_behind_and_the_notes_come() -> None:
    with pytest.raises(Demanding) as caught:
        raise Demanding(1, "x") from KeyError("cause")
    caught.value.__notes__ = ["a note"]
    arrived = there_and_back(caught.value)
    assert arrived is not None
    assert (arrived.__traceback__, arrived.__cause__, arrived.__notes__) == (None, None, ["a note"])


def test_attributes_that_cannot_travel_are_left_out_and_noted() -> None:
    exc = Demanding(7, "text")
    exc.args = ("text", threading.Lock())
    exc.guard = threading.Lock()  # type: ignore[attr-defined]
    arrived = there_and_back(exc)
    assert isinstance(arrived, Demanding)
    assert arrived.code == 7
    assert not hasattr(arrived, "guard")
    assert arrived.args[0] == "text"
    assert arrived.args[1].startswith("<unlocked _thread.lock")
    assert arrived.__notes__ == [
        "The attribute `guard`, a _thread.lock, stayed in the rank.",
        "The argument 1, a _thread.lock, stayed in the rank.",
    ]


class Untransportable(Exception):
    def __reduce__(self) -> Any:
        message = "no"
        raise RuntimeError(message)


class Unbuildable(Exception):
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_exception_that_cannot_travel_and_another_object_are_none() -> None:
    assert travel.pack_exception(Untransportable()) is None
    assert there_and_back(Unbuildable()) is None
    assert travel.unpack_exception(travel.pack_value(3)) is None
