"""One table of the names that programs import from Accelerate, for all its import paths.

A name is found whichever of Accelerate's modules a program names: `compat`, `compat.utils`, `compat.data_loader` and
the others answer alike. What has no counterpart is found too, and raises where it is used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

from notebook_launcher import training

ALIASES = (
    "accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "inference", "local_sgd", "logging",
    "memory_utils", "optimizer", "parallelism_config", "scheduler", "tracking", "utils",
    "utils.ao", "utils.bnb", "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.environment",
    "utils.fsdp_utils", "utils.imports", "utils.launch", "utils.megatron_lm", "utils.memory", "utils.modeling",
    "utils.offload", "utils.operations", "utils.other", "utils.random", "utils.torch_xla",
    "utils.transformer_engine", "utils.versions",
)  # fmt: skip
"""Accelerate's modules whose names this package has elsewhere."""

OWN = {
    "Accelerator": "rules",
    "AcceleratorState": "state",
    "GradientState": "state",
    "PartialState": "state",
    "debug_launcher": "launchers",
    "get_logger": "rules",
    "notebook_launcher": "launchers",
    "prepare_data_loader": "rules",
    "reduce": "rules",
}
"""Names that decide by Accelerate's rules, each with its module of `compat`."""

OFFERED = {
    **dict.fromkeys(training.__all__, "training"),
    **{name: f"compat.{module}" for name, module in OWN.items()},
    "AcceleratedScheduler": "training.accumulation.updates",
    "MultiProcessAdapter": "compat.rules",
    "TorchTensorParallelConfig": "training.parallelism.mesh",
    "get_sampler": "training.data.samplers",
    "notebook_launch": "kernel.launch",
}
"""Every name with a counterpart in training, and its module; modules of `TABLES` have further ones."""

TABLES = ("availability", "utilities", "refusals")
"""The modules of `compat` whose `NAMES` are looked through for all other names, in this order."""


def find(name: str) -> Any:
    """Return what a name of Accelerate's stands for; this is `__getattr__` of every module of `compat`.

    Raises:
        AttributeError: Accelerate has no such name, or none that programs import.
    """
    if name in OFFERED:
        return getattr(importlib.import_module(f"notebook_launcher.{OFFERED[name]}"), name)
    if not name.startswith("__"):
        for table in TABLES:
            names = importlib.import_module(f"notebook_launcher.compat.{table}").NAMES
            if name in names:
                found = names[name]
                if "<" in getattr(found, "__qualname__", ""):  # A lambda travels, and is exported, by its name here.
                    found.__module__, found.__name__, found.__qualname__ = "notebook_launcher.compat", name, name
                return found
    raise AttributeError(f"module 'notebook_launcher.compat' has no attribute {name!r}")


def make_modules(package: dict[str, Any]) -> None:
    """Make the modules of `ALIASES` in the package with these variables."""
    made: dict[str, Any] = {"": package}
    for alias in ALIASES:
        name, (parent, _, last) = f"{package['__name__']}.{alias}", alias.rpartition(".")
        module = module_from_spec(ModuleSpec(name, None, is_package=alias == "utils"))
        module.__doc__ = f"`accelerate.{alias}`, with every name that this package has for Accelerate's."
        variables = made[alias] = vars(module)
        variables["__getattr__"] = find
        sys.modules[name] = made[parent][last] = module
