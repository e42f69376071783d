"""DeepSpeed's settings, by the names of Accelerate's DeepSpeedPlugin and of DeepSpeed's JSON file."""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.settings.training_settings import STEPS_VARIABLE
from notebook_launcher.training.process.environment import flag
from notebook_launcher.wording import type_of, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


PREFIX = "ACCELERATE_DEEPSPEED_"
KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}
"""Arguments of the plugin, each with its key in a file."""
VARIABLES = {
    "gradient_accumulation_steps": STEPS_VARIABLE,
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": f"{PREFIX}ZERO_STAGE",
    "offload_optimizer_device": f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": f"{PREFIX}OFFLOAD_PARAM_DEVICE",
}
DEVICES = ("none", "cpu")
STAGES = (0, 1, 2, 3)
OLD_OFFLOADS = {
    "offload_optimizer_device": "zero_optimization.cpu_offload",
    "offload_param_device": "zero_optimization.cpu_offload_param",
}
"""The keys of older files, which are true or false."""
NO_NVME = (
    "offloading to NVMe has no counterpart in torch. Use the device 'cpu', or run DeepSpeed itself, with "
    "deepspeed.initialize in the function."
)


@dataclasses.dataclass
class DeepSpeedPlugin:
    """Settings of DeepSpeed, which torch carries out; DeepSpeed itself need not be installed.

    Stage 1 shards the optimizer's state, stage 2 also the gradients, and stage 3 also the parameters. An argument that
    is not given comes from the file, then from Accelerate's variable such as `ACCELERATE_DEEPSPEED_ZERO_STAGE`.

    Raises:
        ValueError: An argument and the file differ, or a setting has no counterpart; the message names it and what to
            write instead.
    """

    hf_ds_config: Any = None
    """DeepSpeed's settings: the path of a JSON file, a dictionary, or the text of such a file. None: the file that
    `ACCELERATE_DEEPSPEED_CONFIG_FILE` names, if any."""
    gradient_accumulation_steps: Any = None
    """Micro-batches per update. None or `"auto"`: the Accelerator's."""
    gradient_clipping: Any = None
    """Norm to which gradients are clipped before each update. 0: they are not. None or `"auto"`: the Accelerator's
    `max_grad_norm`."""
    zero_stage: Any = None
    """0, 1, 2 or 3. None: the file's, else 2."""
    is_train_batch_min: bool = True
    """Accepted and without effect."""
    offload_optimizer_device: Any = None
    """`"none"` or `"cpu"`. With `"cpu"` the shards of parameters, gradients and optimizer state live on the CPU, where
    the optimizer steps."""
    offload_param_device: Any = None
    """`"none"` or `"cpu"`, in stage 3; torch does the same for both offloads."""
    offload_optimizer_nvme_path: Any = None
    """Not supported."""
    offload_param_nvme_path: Any = None
    """Not supported."""
    zero3_init_flag: Any = None
    """Accepted and without effect: build the model on the meta device, or load it on rank 0 alone."""
    zero3_save_16bit_model: Any = None
    """Accepted and without effect: `save_model` always gathers."""
    transformer_moe_cls_names: Any = None
    """Accepted and without effect."""
    enable_msamp: Any = None
    """Not supported."""
    msamp_opt_level: Any = None
    """Not supported."""

    def __post_init__(self) -> None:
        given = os.environ.get(f"{PREFIX}CONFIG_FILE", "none") if self.hf_ds_config is None else self.hf_ds_config
        self.hf_ds_config = None if given == "none" else given
        from_file = self.hf_ds_config is not None
        self.deepspeed_config: dict[str, Any] = _read(self.hf_ds_config) if from_file else {}
        """All settings by DeepSpeed's names; they may be changed until `Accelerator(...)` reads them."""
        if self.enable_msamp:
            raise ValueError("enable_msamp=True: fp8 by MS-AMP has no counterpart. Use mixed_precision='bf16'.")
        self._check_offloads()
        if from_file and value_at(self.deepspeed_config, KEYS["zero_stage"]) is None and self.zero_stage is None:
            raise ValueError(
                f"{_name_of(self.hf_ds_config)} has no zero_optimization.stage. Add "
                '`"zero_optimization": {"stage": 2}`, or pass DeepSpeedPlugin(zero_stage=2).'
            )
        for name, key in KEYS.items():
            self._settle(name, key)
        self.check()

    @property
    def left_out(self) -> tuple[str, ...]:
        """The file's keys that only tune DeepSpeed's own engine."""
        return check_keys(self.deepspeed_config)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the setting with a key such as `"zero_optimization.stage"`."""
        value = value_at(self.deepspeed_config, ds_key_long)
        return default if value is None else value

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if a setting is `"auto"`, so that the call decides."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def check(self) -> None:
        """Raise ValueError for settings that cannot be carried out."""
        check_keys(self.deepspeed_config)
        for section in ("optimizer", "scheduler"):
            if asked := self.deepspeed_config.get(section):
                raise ValueError(
                    f"DeepSpeed's {section} is not created from the settings. Remove it there, create it in the "
                    f"function by the same values, and pass it to accelerator.prepare(): {asked}"
                )
        stage = _whole(self.zero_stage)
        if stage not in STAGES:
            raise ValueError(f"zero_stage={self.zero_stage!r} is unknown. It can be 0, 1, 2 or 3.")
        self.zero_stage = stage
        for name in ("offload_optimizer_device", "offload_param_device"):
            _check_device(name, getattr(self, name))
        if self.offload_param_device == "cpu" and stage != 3:
            raise ValueError(
                f"offload_param_device='cpu' needs zero_stage=3, not {stage}: other stages keep whole parameters. Use "
                "offload_optimizer_device='cpu'."
            )
        if self.offload_optimizer_device == "cpu" and stage == 0:
            raise ValueError("offload_optimizer_device='cpu' needs zero_stage=1, 2 or 3, not 0.")

    def _settle(self, name: str, key: str) -> None:
        """Settle one argument and the file's key, and write the value into both."""
        argument, in_file = getattr(self, name), value_at(self.deepspeed_config, key)
        if in_file is None and name in OLD_OFFLOADS and value_at(self.deepspeed_config, OLD_OFFLOADS[name]):
            in_file = "cpu"
        if argument not in (None, AUTO) and in_file not in (None, AUTO) and _whole(argument) != _whole(in_file):
            raise ValueError(
                f"DeepSpeedPlugin({name}={argument!r}) and {key}={in_file!r} in {_name_of(self.hf_ds_config)} differ. "
                'Pass one of them, or write "auto" into the file.'
            )
        value = in_file if argument in (None, AUTO) else argument
        if value in (None, AUTO):
            value = _from_environment(name)
        setattr(self, name, value)
        _write(self.deepspeed_config, key, value)

    def _check_offloads(self) -> None:
        for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
            path = getattr(self, name) or os.environ.get(PREFIX + name.upper(), "none")
            if path != "none":
                raise ValueError(f"{name}={path!r}: {NO_NVME}")


def deepspeed_is_asked_for() -> bool:
    """Return True if `ACCELERATE_USE_DEEPSPEED` asks for DeepSpeed, as `accelerate launch` does."""
    return flag(os.environ, "ACCELERATE_USE_DEEPSPEED")


def _read(given: Any) -> dict[str, Any]:
    """Return the settings of a file, a dictionary, or a text."""
    config = getattr(given, "config", given)  # Hugging Face's HfDeepSpeedConfig
    if isinstance(config, dict):
        return copy.deepcopy(config)
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"hf_ds_config={given!r} is {type_of(given)}; it must be a path or a dictionary.")
    text = os.fspath(config)
    if not text.lstrip().startswith("{"):
        text = _contents(text)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{_name_of(given)} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{_name_of(given)} must hold settings by name, but holds a {type(found).__name__}.")  # noqa: TRY004
    return found


def _contents(text: str) -> str:
    """Return what a file holds, or a text in base64, in which Hugging Face's launcher passes a file on."""
    path = Path(text).expanduser()
    with contextlib.suppress(OSError):  # too long for a path
        if path.is_file():
            return path.read_text(encoding="utf-8")
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except ValueError:
        raise ValueError(f"hf_ds_config={text!r}: there is no such file. Pass a path from {Path.cwd()}.") from None


def _from_environment(name: str) -> Any:
    default = {"zero_stage": 2, "offload_optimizer_device": "none", "offload_param_device": "none"}.get(name, AUTO)
    text = os.environ.get(VARIABLES[name])
    if text is None or name == "gradient_accumulation_steps":
        return default  # the Accelerator reads the variable of the steps itself
    if name == "zero_stage":
        return _whole(text)
    if name == "gradient_clipping" and text != AUTO:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{VARIABLES[name]}={text!r} must be a number or auto.") from None
    return text


def _whole(value: Any) -> Any:
    """Return a number that a text or a float holds; anything else as it is."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_device(name: str, device: Any) -> None:
    if device == "nvme":
        raise ValueError(f"{name}='nvme': {NO_NVME}")
    if device not in DEVICES:
        raise ValueError(unknown(name, device, DEVICES))


def _write(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(config.get(section), dict):
            config[section] = {}  # also where a file has null
        config = config[section]
    config[last] = value


def _name_of(given: Any) -> str:
    return os.fspath(given)[:80] if isinstance(given, (str, os.PathLike)) else "hf_ds_config"


# --------------------------------------------------------------------------------------------------------------------
# The keys of a DeepSpeed file: some are carried out by torch, some only tune DeepSpeed, and some are refused.
#
# The lists follow DeepSpeed 0.19 (`deepspeed/runtime/config.py` and `deepspeed/runtime/zero/config.py`). A key with a
# dot is inside a section: `zero_optimization.stage`.


AUTO = "auto"
"""The value of a key that the call, and not the file, decides."""

CARRIED_OUT = frozenset(
    (
        "bf16.enabled",
        "bfloat16.enabled",
        "fp16.auto_cast",
        "fp16.enabled",
        "fp16.initial_scale_power",
        "fp16.loss_scale",
        "fp16.loss_scale_window",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "torch_autocast.dtype",
        "torch_autocast.enabled",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
        "zero_optimization.stage",
    )
)
"""Keys with a meaning here."""

LEFT_OUT = frozenset(
    (
        "activation_checkpointing",
        "aio",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comms_logger",
        "compile",
        "csv_monitor",
        "dataloader_drop_last",
        "disable_allgather",
        "dump_state",
        "flops_profiler",
        "fp16",
        "graph_harvesting",
        "memory_breakdown",
        "monitor_config",
        "seq_parallel_comm_data_type",
        "steps_per_print",
        "tensorboard",
        "torch_autocast",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    )
)
"""Keys, or whole sections, that tune or log DeepSpeed's own engine. They change no number of the training."""

MEANINGLESS = frozenset(
    (
        "fp16.auto_cast",
        "fp16.consecutive_hysteresis",
        "fp16.fused_mode",
        "fp16.hysteresis",
        "fp16.min_loss_scale",
        "steps_per_print",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    )
)
"""Of these, the keys that no line names, because their absence does not matter."""

SHARDS = "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
IN_CODE = "Write it in the training function"
REFUSED = {
    "amp": 'apex is not used. Use `"bf16": {"enabled": true}`',
    "communication_data_type": "Use fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy="
    "MixedPrecisionPolicy(reduce_dtype=...))",
    "compression_training": f"Compression has no counterpart. {IN_CODE} with torchao",
    "curriculum_learning": f"{IN_CODE}, as a sampler of the data loader",
    "data_efficiency": f"{IN_CODE}, as a sampler of the data loader",
    "data_types.grad_accum_dtype": "Gradients are kept in the dtype of the weights, which is float32. Leave it out",
    "eigenvalue": IN_CODE,
    "elasticity": "Ranks do not come and go. Use notebook_launch(..., max_restarts=...)",
    "fp16.fp16_master_weights_and_grads": "Weights are kept in float32. Leave it out",
    "fp8": 'Use mixed_precision="bf16"',
    "gradient_predivide_factor": "Gradients are averaged exactly. Leave it out",
    "hybrid_engine": "Generate with the prepared model inside torch.no_grad()",
    "inference": "Generate with the prepared model inside torch.no_grad()",
    "moe": "Experts are sharded like other weights. Leave it out",
    "msamp": 'Use mixed_precision="bf16"',
    "pipeline": f"Pipeline parallelism has no counterpart. Shard the weights instead: {SHARDS}",
    "prescale_gradients": "Gradients are averaged exactly. Leave it out",
    "progressive_layer_drop": IN_CODE,
    "quantize_training": f"{IN_CODE} with torchao",
    "sequence_parallel_size": "Sequence parallelism has no counterpart. Use activation checkpointing",
    "sparse_attention": f"{IN_CODE} with torch.nn.attention.flex_attention",
    "sparse_gradients": "Use torch.nn.Embedding(sparse=False), which is the default",
    "tensor_parallel": "Use ParallelismConfig(tp_size=...) beside the plugin",
    "weight_quantization": f"{IN_CODE} with torchao",
    "zero_optimization.mics_shard_size": f"Shards within groups of ranks are {SHARDS}",
    "zero_optimization.offload_optimizer.ratio": "The optimizer's state is offloaded as a whole. Leave it out",
    "zero_optimization.zenflow": 'Use `"offload_optimizer": {"device": "cpu"}` alone',
    "zero_optimization.zero_hpz_partition_size": f"Shards within groups of ranks are {SHARDS}",
    "zero_optimization.zero_quantized_gradients": "Use a bf16 reduction: FullyShardedDataParallelPlugin("
    "mixed_precision_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))",
    "zero_optimization.zero_quantized_nontrainable_weights": f"{IN_CODE} with torchao",
    "zero_optimization.zero_quantized_weights": 'Use mixed_precision="bf16", which gathers weights in bf16',
    "zero_optimization.zeropp_loco_param": "Leave it out",
}
"""Keys that would change the training and have no counterpart, each with what to write instead."""
HARMLESS_VALUES: Mapping[str, Any] = {
    "communication_data_type": "fp32",
    "data_types.grad_accum_dtype": "fp32",
    "gradient_predivide_factor": 1.0,
    "sequence_parallel_size": 1,
    "tensor_parallel": {"autotp_size": 0},
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.zero_hpz_partition_size": 1,
}
"""Values of refused keys that ask for nothing."""


def check_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that only tune DeepSpeed and are left out, so that a line can name them.

    Raises:
        ValueError: A key asks for something that has no counterpart, or DeepSpeed does not know it.
    """
    left_out: list[str] = []
    for key, value in _leaves(config):
        known = next((name for name in _with_sections(key) if name in REFUSED), None)
        if known is not None:
            if (
                not is_off(value)
                and value not in (AUTO, HARMLESS_VALUES.get(known))
                and not _section_is_off(config, known)
            ):
                raise ValueError(
                    f"DeepSpeed's {key}={value!r} has no counterpart, and torch carries these settings out. "
                    f"{REFUSED[known]}; or run DeepSpeed itself, with deepspeed.initialize in the function."
                )
        elif not any(name in CARRIED_OUT for name in _with_sections(key)):
            _check_known(key)
            if key not in MEANINGLESS and not is_off(value) and not _section_is_off(config, key):
                left_out.append(key)
    return tuple(left_out)


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key with dots; None if the file has none."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def is_off(value: Any) -> bool:
    """Return True for a value that asks for nothing: none, false, 0, an empty section."""
    return value in (None, False, 0, "", "none", {}, [])


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in CARRIED_OUT:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _with_sections(key: str) -> list[str]:
    """Return the key and the sections that it is in, the innermost first."""
    names = key.split(".")
    return [".".join(names[:number]) for number in range(len(names), 0, -1)]


def _section_is_off(config: Mapping[str, Any], key: str) -> bool:
    sections = (value_at(config, name) for name in _with_sections(key))
    return any(isinstance(section, dict) and section.get("enabled") is False for section in sections)


def _check_known(key: str) -> None:
    """Raise ValueError for a misspelt key, which DeepSpeed itself ignores."""
    section = key.split(".", maxsplit=1)[0]
    known = {name.split(".", maxsplit=1)[0] for name in (*CARRIED_OUT, *REFUSED, *LEFT_OUT)}
    close = difflib.get_close_matches(section, known, n=1, cutoff=0.85)
    if section not in known and close:
        raise ValueError(f"DeepSpeed has no setting {section!r}. Did you mean {close[0]!r}?")
