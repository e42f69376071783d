"""Machines and names of the notebook, for tests of panels."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.machine import devices
from tests.support.panels import machine

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has launches find a machine."""
    return lambda *args, **kwargs: monkeypatch.setattr(devices, "detect", lambda: machine(*args, **kwargs))


@pytest.fixture
def small_machine(on: Callable[..., None]) -> None:
    """Let launches find a machine of two cores, without GPUs."""
    on(2)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the notebook's cells."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module.__dict__
