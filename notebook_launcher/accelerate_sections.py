"""Sections of Accelerate's settings file about sharding, and the variables that `accelerate launch` makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SECTIONS", "USE_FSDP", "USE_PARALLELISM", "sections_of", "variables_of"]

SECTIONS = {"fsdp_config": "FSDP_", "parallelism_config": "PARALLELISM_CONFIG_"}
"""Keys of sections, each with the prefix of its variables."""
USE_FSDP = "ACCELERATE_USE_FSDP"
USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
OTHER_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
"""Variables whose keys in the file have other names."""
SHARD_ALONE = {"fsdp_config": {"fsdp_version": 2}}
"""The section that is written for `shard`, which is in the comment."""


def variables_of(values: Mapping[str, Any], *, shard: Any) -> dict[str, str]:
    """Return the variables that a file's sections stand for.

    Args:
        values: The file.
        shard: The option in the file's comment; the section that was written with it says nothing more.
    """
    sections = {key: values[key] for key in SECTIONS if isinstance(values.get(key), dict)}
    shards = values.get("distributed_type") == "FSDP"
    if not (shards or values.get("use_parallelism_config")) or (shard is not None and sections == SHARD_ALONE):
        return {}
    found = {USE_FSDP: "true"} if shards else {USE_PARALLELISM: "true"}
    for section in sections.values():
        for key, value in section.items():
            name = OTHER_NAMES.get(key.upper(), key.upper())
            if value is not None:
                found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def sections_of(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sections that options stand for, and the variables that are in no section."""
    env = dict(options.get("env", {}))
    if env.pop(USE_FSDP, "").lower() != "true":
        sections: dict[str, Any] = dict(SHARD_ALONE) if options.get("shard", 1) > 1 else {}
        return sections, dict(options.get("env", {}))
    names = {variable: key for key, variable in OTHER_NAMES.items()}
    sections = {key: {} for key in SECTIONS}
    for name in list(env):
        for key, prefix in SECTIONS.items():
            if name.startswith(prefix):
                sections[key][names.get(name, name).lower()] = _value(env.pop(name))
    return {key: section for key, section in sections.items() if section or key == "fsdp_config"}, env


def _value(text: str) -> bool | int | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() and str(int(text)) == text else text
