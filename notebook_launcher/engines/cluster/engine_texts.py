"""Engines as texts that are typed, such as `"slurm"` or `"ssh gpu1 gpu2"`, and as plain values for a settings file."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster.command_engines import SSH, Commands, Slurm
from notebook_launcher.engines.cluster.ray_engine import Ray
from notebook_launcher.errors import ConfigError
from notebook_launcher.wording.counts import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.engines.engine import Engine

__all__ = ["describe_found", "from_settings", "read", "to_settings", "write"]

ENGINES: dict[str, Any] = {kind.__name__: kind for kind in (Commands, Ray, SSH, Slurm)}
HERE = "this machine"


def read(text: str) -> Engine | None:
    """Return the engine that a text means; None for this machine; raises `ConfigError`."""
    if text.strip().lower() in ("", "none", HERE):
        return None
    kind, *hosts = text.replace(",", " ").split()
    if kind.lower() == "slurm" and not hosts:
        return Slurm()
    if kind.lower() == "ssh" and hosts:
        return SSH(hosts)
    if kind.lower() == "ray" and len(hosts) < 2:
        return Ray(hosts[0]) if hosts else Ray()
    raise ConfigError(
        f"engine={text!r} is not an engine. A text can be '{HERE}', 'slurm', 'ray', 'ray' with a cluster's address, "
        "or 'ssh' with names of hosts, as in 'ssh gpu1 gpu2'; in code, pass Commands([...]), Ray(), SSH([...]) or "
        "Slurm().",
        field="engine",
    )


def write(engine: Engine | None) -> str:
    """Return the text that `read` takes for an engine; empty for this machine, and for an engine that has no text."""
    settings = to_settings(engine) if type(engine) in ENGINES.values() and engine is not None else {}
    if settings == {"kind": "Slurm"}:
        return "slurm"
    if settings.get("kind") == "Ray" and settings.keys() <= {"kind", "address"}:
        return " ".join(["ray", *([settings["address"]] if "address" in settings else [])])
    return " ".join(["ssh", *settings["hosts"]]) if settings.keys() == {"kind", "hosts"} else ""


def to_settings(engine: Engine) -> dict[str, Any]:
    """Return an engine as plain values: its kind, and the fields that differ from their defaults."""
    if type(engine) not in ENGINES.values():
        raise ConfigError(
            f"engine={engine!r} has no place in a settings file: it is not one of {', '.join(ENGINES)}.", field="engine"
        )
    fields = [field for field in dataclasses.fields(engine) if field.init]  # type: ignore[arg-type]
    values = {field.name: getattr(engine, field.name) for field in fields}
    changed = {field.name: _plain(values[field.name]) for field in fields if values[field.name] != field.default}
    return {"kind": type(engine).__name__, **changed}


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def from_settings(settings: Mapping[str, Any]) -> Engine:
    """Return the engine of settings that `to_settings` returned; raises `ConfigError` for others."""
    kind, options = settings.get("kind"), {name: value for name, value in settings.items() if name != "kind"}
    known = [field.name for field in dataclasses.fields(ENGINES[kind]) if field.init] if kind in ENGINES else []
    if kind not in ENGINES or not options.keys() <= set(known):
        raise ConfigError(
            f"engine={dict(settings)!r} is not an engine: its kind can be {', '.join(ENGINES)}, with their fields.",
            field="engine",
        )
    try:
        return ENGINES[kind](**options)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ConfigError(f"engine={dict(settings)!r} is not an engine: {error}.", field="engine") from None


def describe_found(environ: Mapping[str, str]) -> str:
    """Return what to type for each kind of machine, as far as it is known without asking the machines."""
    texts = [f"Empty: {HERE}", "ssh gpu1 gpu2: hosts that ssh reaches"]
    if importlib.util.find_spec("ray") is not None:
        address = environ.get("RAY_ADDRESS")
        texts.append(f"ray: the Ray cluster {f'at {address}' if address else 'of this machine'}")
    if environ.get(Slurm.VARIABLE):
        nodes, gpus = environ.get("SLURM_JOB_NUM_NODES", ""), environ.get("SLURM_GPUS_ON_NODE", "")
        has = [plural(int(nodes), "node")] if nodes.isdecimal() else []
        has += [f"{plural(int(gpus), 'GPU')} each"] if gpus.isdecimal() else []
        texts.insert(1, f"slurm: the allocation here{' with ' if has else ''}{', '.join(has)}")
    return "; ".join(texts)
