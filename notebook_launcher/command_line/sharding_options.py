"""Options of `accelerate launch` about FSDP, DeepSpeed, parallelism and compilation, as the variables that it sets.

An Accelerator in the script reads the variables; this package's and Hugging Face's alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError
from notebook_launcher.settings.accelerate_deepspeed import KIND, SECTION, SWITCH, deepspeed_options
from notebook_launcher.settings.accelerate_sections import SECTIONS, USE_FSDP, USE_PARALLELISM, variables_of
from notebook_launcher.wording.choices import read_bool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Choices = Mapping[str, tuple[str, ...] | None]

__all__ = ["DYNAMO", "SWITCHES", "sharding_env"]

TRUTH = ("true", "false")
FSDP: Choices = {
    "fsdp_version": ("1", "2"),
    "fsdp_sharding_strategy": None,
    "fsdp_reshard_after_forward": None,
    "fsdp_offload_params": TRUTH,
    "fsdp_min_num_params": None,
    "fsdp_auto_wrap_policy": None,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "fsdp_backward_prefetch": None,
    "fsdp_forward_prefetch": TRUTH,
    "fsdp_state_dict_type": None,
    "fsdp_use_orig_params": TRUTH,
    "fsdp_cpu_ram_efficient_loading": TRUTH,
    "fsdp_sync_module_states": TRUTH,
    "fsdp_activation_checkpointing": TRUTH,
    "fsdp_activation_checkpointing_offload": TRUTH,
}
MESH_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
PARALLELISM: Choices = {f"parallelism_config_{name}_size": None for name in MESH_SIZES}
DEEPSPEED: Choices = {
    "deepspeed_config_file": None,
    "zero_stage": ("0", "1", "2", "3"),
    "offload_optimizer_device": ("none", "cpu"),
    "offload_param_device": ("none", "cpu"),
    "zero3_init_flag": TRUTH,
    "zero3_save_16bit_model": TRUTH,
    "deepspeed_moe_layer_cls_names": None,
}
SWITCHES: Mapping[str, Choices] = {"use_fsdp": FSDP, "use_parallelism_config": PARALLELISM, "use_deepspeed": DEEPSPEED}
"""Options without a value, each with the options that need it and their values; None: the Accelerator checks them."""
VARIABLES = {"use_fsdp": USE_FSDP, "use_parallelism_config": USE_PARALLELISM, "use_deepspeed": SWITCH}
VALUED = tuple(name for group in SWITCHES.values() for name in group)
DYNAMO = "dynamo_backend"


def sharding_env(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the options stand for.

    Args:
        options: Options as typed, by name; None and False: not given.
        environ: Variables that a settings file gives, which may switch FSDP or DeepSpeed on.

    Raises:
        ConfigError: A value is unknown, or an option stands without the one that it needs.
    """
    on = [switch for switch in SWITCHES if options.get(switch)]
    if "use_fsdp" in on and "use_deepspeed" in on:
        raise ConfigError("--use_fsdp and --use_deepspeed exclude each other. Leave one of them out.")
    for switch, group in SWITCHES.items():
        given = [name for name in group if options.get(name) is not None]
        for name in given:
            _check(name, options[name], group[name])
        if given and switch not in on and read_bool(environ.get(VARIABLES[switch], "")) is not True:
            raise ConfigError(f"--{given[0]} {options[given[0]]} has no effect without --{switch}: write both.")
    env = dict(_variables(options))
    env |= {VARIABLES[switch]: "true" for switch in on}
    if options.get(DYNAMO) is not None:
        env["ACCELERATE_DYNAMO_BACKEND"] = options[DYNAMO].lower()
    return env


def _variables(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    given = {name: options[name] for name in VALUED if options.get(name) is not None}
    sections = {section: {name: given[name] for name in _names_of(section) if name in given} for section in SECTIONS}
    found = variables_of({"distributed_type": "FSDP", **sections}, shard=None)
    found |= deepspeed_options({"distributed_type": KIND, SECTION: given})["env"]
    for name, value in found.items():
        if name not in VARIABLES.values():
            yield name, value.lower() if value.lower() in TRUTH else value


def _names_of(section: str) -> Iterator[str]:
    prefix = section.removesuffix("_config") if section == "fsdp_config" else section
    return (name for name in VALUED if name.startswith(f"{prefix}_"))


def _check(name: str, text: str, choices: tuple[str, ...] | None) -> None:
    known = read_bool(text) is not None if choices == TRUTH else choices is None or text in choices
    if not known:
        raise ConfigError(f"--{name} {text}: it can be {', '.join(choices or ())}.")
    if name.endswith("_size") and not text.isdecimal():
        raise ConfigError(f"--{name} {text}: write a whole number of ranks, 1 or more.")
