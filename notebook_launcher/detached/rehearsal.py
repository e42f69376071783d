"""The preparation of a spare host, which has time until its request arrives.

A forked process pays 5 µs for each page of memory that it shares and changes, and running a function of Python changes
its page, because references are counted there. A host changes 1,200 pages until its ranks have begun, 9 ms of processor
time. After the rehearsal it is 250 pages and 5.5 ms. It takes 50 ms, and 20 MB of memory.
"""

from __future__ import annotations

import gc
import pickle
import sys
import types
from typing import Any

from notebook_launcher.config import LaunchConfig
from notebook_launcher.detached.requests import HostOrder
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.machine.devices import Machine
from notebook_launcher.processes import boot
from notebook_launcher.travel import cells

__all__ = ["rehearse"]

PACKAGES = tuple(
    f"notebook_launcher.{name}"
    for name in (
        "config", "detached", "engines", "errors", "history", "kernel", "machine", "messaging", "processes", "settings",
        "travel", "wording",
    )
)  # fmt: skip
"""Packages and modules of which a host runs the functions."""
LIBRARIES = frozenset({
    "_weakrefset", "codecs", "collections", "contextlib", "dataclasses", "json", "json.encoder", "os", "pathlib",
    "posixpath", "queue", "selectors", "signal", "socket", "threading", "weakref",
})  # fmt: skip
"""Modules of the standard library that these functions call."""
CODE = (classmethod, dict, property, staticmethod, tuple, type, types.CodeType, types.FunctionType)
"""Types of the objects that code consists of."""


def rehearse() -> None:
    """Do what a host does first, for ranks that never start, and touch the code that it runs later."""
    machine = Machine(num_cores=2, gpus=(), why_no_gpu="")
    plan = make_plan(LaunchConfig(num_processes=2, devices="cpu"), machine)
    order = HostOrder(
        plan=plan,
        name="",
        arguments={},
        source="",
        environment={},
        places=cells.places(),
        surroundings=plan.setup(many_calls=False),
    )
    boot.enter_kernel_surroundings(pickle.loads(pickle.dumps(order)).surroundings)
    _touch_code()


def _touch_code() -> None:
    """Visit every object of a host's code: a visit counts a reference, which makes the object's page this process's."""
    waiting: list[Any] = [vars(module) for name, module in list(sys.modules.items()) if _is_run_by_host(name)]
    seen: set[int] = set()
    while waiting:
        for found in gc.get_referents(waiting.pop()):
            if isinstance(found, CODE) and id(found) not in seen and not _is_foreign(found):
                seen.add(id(found))
                waiting.append(found)


def _is_foreign(found: Any) -> bool:
    """Return True for a class, function or module's namespace that a host does not run."""
    if isinstance(found, (type, types.FunctionType)):
        return not _is_run_by_host(found.__module__)
    return isinstance(found, dict) and "__spec__" in found and not _is_run_by_host(found.get("__name__"))


def _is_run_by_host(module: object) -> bool:
    return isinstance(module, str) and (module in LIBRARIES or module.startswith(PACKAGES))
