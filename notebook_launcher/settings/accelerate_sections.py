"""Sections of Accelerate's settings file, and the variables that `accelerate launch` makes of them.

Two are about sharding, and one, `dynamo_config`, is about compiling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "COMPILER_KEYS",
    "SECTIONS",
    "USE_FSDP",
    "USE_PARALLELISM",
    "compiler_of",
    "compiler_section",
    "compiler_variables",
    "sections_of",
    "variables_of",
]

SECTIONS = {"fsdp_config": "FSDP_", "parallelism_config": "PARALLELISM_CONFIG_"}
"""Keys of sections, each with the prefix of its variables."""
USE_FSDP = "ACCELERATE_USE_FSDP"
USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
OTHER_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
"""Variables whose keys in the file have other names."""
COMPILER_KEYS = ("dynamo_config", "dynamo_backend")
"""Keys about the compiler: the section, and the key of older files."""
COMPILER = "ACCELERATE_DYNAMO_BACKEND"
SHARD_ALONE = {"fsdp_config": {"fsdp_version": 2}}
"""The section that is written for `shard`, which is in the comment."""


def variables_of(values: Mapping[str, Any], *, shard: Any) -> dict[str, str]:
    """Return the variables that a file's sections stand for.

    Args:
        values: The file.
        shard: The option in the file's comment; the section that was written with it adds nothing.
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


def compiler_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings of the compiler by their full names; empty if the file asks for no compiler."""
    section = values.get("dynamo_config") or {}
    if not isinstance(section, dict):
        return {}
    found = {key if key.startswith("dynamo_") else f"dynamo_{key}": value for key, value in section.items()}
    found.setdefault("dynamo_backend", values.get("dynamo_backend"))
    # YAML reads a bare NO as false.
    return {} if str(found["dynamo_backend"] or "no").lower() == "no" else found


def compiler_variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable by which an Accelerator compiles the models that it prepares."""
    found = compiler_of(values)
    return {COMPILER: str(found["dynamo_backend"]).lower()} if found else {}


def compiler_section(env: dict[str, str], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Take the compiler's variable out of `env`; return the section for it, with further keys of the file before."""
    backend = env.pop(COMPILER, "no")
    section = {**compiler_of(kept), "dynamo_backend": backend.upper()}
    return {} if backend == "no" else {"dynamo_config": section}


def _value(text: str) -> bool | int | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() and str(int(text)) == text else text
