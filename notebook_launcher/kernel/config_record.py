"""The options of a launch as a run's record has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from notebook_launcher.wording.secret_text import recordable_variables, redact
from notebook_launcher.wording.value_text import name_of

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig

__all__ = ["config_as_json"]


def config_as_json(config: LaunchConfig) -> dict[str, Any]:
    """Return the fields as values for JSON; of most variables of `env` the name alone, with the value None."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {**{name: _plain(value) for name, value in fields.items()}, "env": recordable_variables(config.env)}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):  # An engine.
        return redact(repr(value))
    if callable(value):  # `setup`.
        return name_of(value)
    return list(cast("tuple[int, ...]", value)) if isinstance(value, tuple) else value
