"""Panels in tests: machines, functions to launch, and hands that type into fields."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from notebook_launcher import LaunchConfig
from notebook_launcher.machine.devices import GPU, Machine

if TYPE_CHECKING:
    from notebook_launcher.widgets import ConfigPanel

GIGABYTE = 10**9


def machine(num_cores: int = 8, num_gpus: int = 0, capability: tuple[int, int] = (9, 0)) -> Machine:
    gpus = tuple(
        GPU(index=at, name="H200", total_memory=140 * GIGABYTE, free_memory=20 * GIGABYTE, capability=capability)
        for at in range(num_gpus)
    )
    return Machine(num_cores=num_cores, gpus=gpus, why_no_gpu="" if gpus else "no GPU found")


class Optimizer(enum.Enum):
    ADAM = "adam"
    SGD = "sgd"


class Model:
    def __repr__(self) -> str:
        raise AssertionError("of a real model it takes long, and it is asked for at each stroke of a key")


def train(lr: float = 0.1, epochs: int = 3, batch_size: int = 32) -> float:
    return lr


def key_of(panel: ConfigPanel, name: str) -> str:
    return name if name in panel.form["fields"] else f"arguments.{name}"


def field(panel: ConfigPanel, name: str) -> Any:
    """Return the field of an option, else that of an argument, as the page shows it."""
    return panel.form["fields"][key_of(panel, name)]


def arguments_of(panel: ConfigPanel) -> list[str]:
    """Return the names of the arguments that have a field."""
    return [key.removeprefix("arguments.") for key in panel.form["fields"] if key.startswith("arguments.")]


def press(panel: ConfigPanel, **message: Any) -> None:
    """Have the panel receive a message of its page."""
    panel._handle_custom_msg(message, [])


def type_in(panel: ConfigPanel, name: str, value: Any) -> None:
    """Type a text into a field, tick it, or choose an entry by its position or its word."""
    words = [choice["word"] for choice in field(panel, name).get("choices", ())]
    value = words.index(value) if value in words else value
    press(panel, type="put", key=key_of(panel, name), value=value, at=0.0)


def words_of(panel: ConfigPanel, name: str, *, disabled: bool = False) -> list[str]:
    """Return the words of the choices of a field; if `disabled`, of the grey ones."""
    return [each["word"] for each in field(panel, name)["choices"] if each["disabled"] or not disabled]


def note_of(panel: ConfigPanel, name: str) -> str:
    return str(field(panel, name)["note"])


def pasted(panel: ConfigPanel, names: dict[str, Any]) -> tuple[Any, dict[str, Any], LaunchConfig]:
    """Run the panel's code as a cell; return the function, its arguments and the options of its call."""
    calls: list[Any] = []

    def notebook_launch(fn, num_processes=None, *, args=(), kwargs=None, **options):
        if num_processes is not None:
            options["num_processes"] = num_processes
        calls.append((fn, {**dict(enumerate(args)), **(kwargs or {})}, LaunchConfig(**options)))

    lines = [line for line in panel.code.splitlines() if line != "from notebook_launcher import notebook_launch"]
    exec("\n".join(lines), {**names, "notebook_launch": notebook_launch})
    (call,) = calls
    return call  # type: ignore[no-any-return]
