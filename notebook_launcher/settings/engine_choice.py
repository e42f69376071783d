"""The option `engine`: as an object, as a text or as settings of a file, and the numbers that must fit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    from notebook_launcher.engines.engine import Engine

HOW = "Name the machines by an engine: engine=SSH([...]), Ray(), Slurm() or Commands([...])."


def chosen(value: Any) -> Engine | None:
    """Return the engine that an option means; raises `ConfigError` if it means none.

    Args:
        value: An engine; a text such as `"slurm"`; settings as `as_settings` returns them; or None.
    """
    if isinstance(value, (str, Mapping)):
        from notebook_launcher.engines.cluster import command_engines

        return command_engines.read(value) if isinstance(value, str) else command_engines.from_settings(value)
    if value is not None and (isinstance(value, type) or not _has_methods(value)):
        raise ConfigError(
            f"engine={value!r} is not an engine. Pass Commands([...]), Ray(), SSH([...]) or Slurm(), 'ray', 'slurm' or "
            "'ssh HOST HOST', or None for this machine.",
            field="engine",
        )
    return value


def _has_methods(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("look", "start"))


def as_settings(engine: Engine) -> dict[str, Any]:
    """Return an engine as plain values for a settings file; raises `ConfigError` for one that has none."""
    from notebook_launcher.engines.cluster import command_engines

    return command_engines.to_settings(engine)


def check_fit(engine: Engine | None, start_method: str, devices: object) -> None:
    """Raise `ConfigError` if other options name things of the kernel's own machine."""
    if engine is None:
        return
    if start_method == "fork":
        raise ConfigError(
            f"start_method='fork' with engine={engine!r}: ranks of other machines cannot be forks of this kernel.",
            field="start_method",
        )
    if isinstance(devices, tuple):
        raise ConfigError(
            f"devices={list(devices)!r} with engine={engine!r}: the numbers count GPUs of this machine. Pass 'cpu', or "
            "None for the GPUs of all nodes.",
            field="devices",
        )


def check_spread(
    num_processes: int | None, nodes: int | None, processes_per_node: int | None, engine: Engine | None
) -> None:
    """Raise `ConfigError` if the numbers of processes, machines and processes of each machine contradict each other."""
    if engine is None and nodes not in (None, 1):
        raise ConfigError(f"nodes={nodes} without an engine: this is one machine. {HOW}", field="nodes")
    if num_processes is not None and nodes is not None and nodes > num_processes:
        raise ConfigError(
            f"nodes={nodes} with num_processes={num_processes}: a node would get no process. Pass "
            f"nodes={num_processes} or less.",
            field="nodes",
        )
    if num_processes is not None and processes_per_node is not None:
        _check_product(num_processes, 1 if engine is None else nodes, processes_per_node)


def _check_product(num_processes: int, nodes: int | None, each: int) -> None:
    asked = f"num_processes={num_processes} with processes_per_node={each}"
    if nodes is not None and num_processes != nodes * each:
        from notebook_launcher.wording import plural  # Here, because every launch imports this module.

        raise ConfigError(
            f"{asked}: {plural(nodes, 'node')} with {each} each make {nodes * each}. Omit one of the numbers.",
            field="processes_per_node",
        )
    if num_processes % each:
        raise ConfigError(
            f"{asked}: {num_processes} / {each} is not a whole number of nodes. "
            f"Pass num_processes={-(-num_processes // each) * each}, a multiple of {each}.",
            field="processes_per_node",
        )
