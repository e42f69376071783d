"""The section `deepspeed_config` of Accelerate's settings file, as the variables that `accelerate launch` sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KIND", "SECTION", "SWITCH", "asks_for_deepspeed", "deepspeed_options"]

KIND = "DEEPSPEED"
SECTION = "deepspeed_config"
SWITCH = "ACCELERATE_USE_DEEPSPEED"
VARIABLES = {
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
}
"""Keys of the section, each with its variable (accelerate 1.15, `prepare_deepspeed_cmd_env`)."""


def deepspeed_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a launch that a settings file with `distributed_type: DEEPSPEED` gives."""
    if values.get("distributed_type") != KIND:
        return {}
    section = values.get(SECTION) or {}
    env = {SWITCH: "true"}
    for key, variable in VARIABLES.items():
        if section.get(key) is not None:
            env[variable] = _text(section[key])
    steps = section.get("gradient_accumulation_steps")
    return {"env": env, **({} if steps in (None, "auto") else {"gradient_accumulation_steps": steps})}


def asks_for_deepspeed(options: Mapping[str, Any]) -> bool:
    """Return True if a launch's options ask for DeepSpeed, as those from such a file do."""
    return SWITCH in (options.get("env") or {})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
