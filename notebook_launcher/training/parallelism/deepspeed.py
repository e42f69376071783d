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
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.settings.training_settings import STEPS_VARIABLE
from notebook_launcher.training.process.environment import flag
from notebook_launcher.wording import unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


PREFIX = "ACCELERATE_DEEPSPEED_"


class Argument(NamedTuple):
    """One argument of the plugin that is also a key of a file."""

    key: str
    variable: str
    """The variable of Accelerate's that holds it, if neither the call nor the file does."""
    default: Any
    older_key: str = ""
    """The key of older files, which is true or false."""


AUTO = "auto"
"""The value of a key that the call, and not the file, decides."""
ZERO = "zero_optimization"
ARGUMENTS = {
    "gradient_accumulation_steps": Argument("gradient_accumulation_steps", STEPS_VARIABLE, AUTO),
    "gradient_clipping": Argument("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", AUTO),
    "zero_stage": Argument(f"{ZERO}.stage", f"{PREFIX}ZERO_STAGE", 2),
    "offload_optimizer_device": Argument(
        f"{ZERO}.offload_optimizer.device", f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE", "none", f"{ZERO}.cpu_offload"
    ),
    "offload_param_device": Argument(
        f"{ZERO}.offload_param.device", f"{PREFIX}OFFLOAD_PARAM_DEVICE", "none", f"{ZERO}.cpu_offload_param"
    ),
}
DEVICES = ("none", "cpu")
STAGES = (0, 1, 2, 3)
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
        for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
            path = getattr(self, name) or os.environ.get(PREFIX + name.upper(), "none")
            if path != "none":
                raise ValueError(f"{name}={path!r}: {NO_NVME}")
        in_file = value_at(self.deepspeed_config, ARGUMENTS["zero_stage"].key)
        if from_file and in_file is None and self.zero_stage is None:
            raise ValueError(
                f"{_name_of(self.hf_ds_config)} has no zero_optimization.stage. Add "
                '`"zero_optimization": {"stage": 2}`, or pass DeepSpeedPlugin(zero_stage=2).'
            )
        for name, argument in ARGUMENTS.items():
            self._settle(name, argument)
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
            device = getattr(self, name)
            if device == "nvme":
                raise ValueError(f"{name}='nvme': {NO_NVME}")
            if device not in DEVICES:
                raise ValueError(unknown(name, device, DEVICES))
        if self.offload_param_device == "cpu" and stage != 3:
            raise ValueError(
                f"offload_param_device='cpu' needs zero_stage=3, not {stage}: other stages keep whole parameters. Use "
                "offload_optimizer_device='cpu'."
            )
        if self.offload_optimizer_device == "cpu" and stage == 0:
            raise ValueError("offload_optimizer_device='cpu' needs zero_stage=1, 2 or 3, not 0.")

    def _settle(self, name: str, row: Argument) -> None:
        """Settle one argument and the file's key, and write the value into both."""
        argument, in_file = getattr(self, name), value_at(self.deepspeed_config, row.key)
        if in_file is None and row.older_key and value_at(self.deepspeed_config, row.older_key):
            in_file = "cpu"
        if argument not in (None, AUTO) and in_file not in (None, AUTO) and _whole(argument) != _whole(in_file):
            raise ValueError(
                f"DeepSpeedPlugin({name}={argument!r}) and {row.key}={in_file!r} in {_name_of(self.hf_ds_config)} "
                'differ. Pass one of them, or write "auto" into the file.'
            )
        value = in_file if argument in (None, AUTO) else argument
        if value in (None, AUTO):
            value = _from_environment(name, row)
        setattr(self, name, value)
        _write(self.deepspeed_config, row.key, value)


def deepspeed_is_asked_for() -> bool:
    """Return True if `ACCELERATE_USE_DEEPSPEED` asks for DeepSpeed, as `accelerate launch` does."""
    return flag(os.environ, "ACCELERATE_USE_DEEPSPEED")


def _read(given: Any) -> dict[str, Any]:
    """Return the settings of a file, a dictionary, or a text."""
    config = getattr(given, "config", given)  # Hugging Face's HfDeepSpeedConfig
    if isinstance(config, dict):
        return copy.deepcopy(config)
    text = os.fspath(config)
    if not text.lstrip().startswith("{"):
        text = _contents(text)
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{_name_of(given)} is not JSON: {error}.") from error


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


def _from_environment(name: str, row: Argument) -> Any:
    text = os.environ.get(row.variable)
    if text is None or name == "gradient_accumulation_steps":
        return row.default  # the Accelerator reads the variable of the steps itself
    if name == "zero_stage":
        return _whole(text)
    if name == "gradient_clipping" and text != AUTO:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{row.variable}={text!r} must be a number or auto.") from None
    return text


def _whole(value: Any) -> Any:
    """Return a number that a text or a float holds; anything else as it is."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
# The keys of a DeepSpeed file: some are carried out by torch, and some are refused. All others tune or log DeepSpeed's
# own engine, and change no number of the training: they are left out, and named.
#
# The table follows DeepSpeed 0.19 (`deepspeed/runtime/config.py` and `deepspeed/runtime/zero/config.py`). A key with a
# dot is inside a section: `zero_optimization.stage`.


class Refusal(NamedTuple):
    """A key that would change the training and has no counterpart."""

    advice: str
    """What to write instead."""
    harmless: Any = None
    """A value that asks for nothing."""


CARRIED_OUT = "torch carries it out"
UNTOLD = "it is left out, and no line names it, because its absence does not matter"
SHARDS = "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
IN_CODE = "Write it in the training function"
TAKEN = {
    CARRIED_OUT: """
        bf16.enabled bfloat16.enabled fp16.auto_cast fp16.enabled fp16.initial_scale_power fp16.loss_scale
        fp16.loss_scale_window gradient_accumulation_steps gradient_clipping optimizer scheduler
        torch_autocast.dtype torch_autocast.enabled train_batch_size train_micro_batch_size_per_gpu
        zero_optimization.cpu_offload zero_optimization.cpu_offload_param zero_optimization.offload_optimizer.device
        zero_optimization.offload_param.device zero_optimization.stage""",
    UNTOLD: """
        fp16.consecutive_hysteresis fp16.fused_mode fp16.hysteresis fp16.min_loss_scale steps_per_print
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
}
KEYS: Mapping[str, str | Refusal] = {
    **{key: kind for kind, keys in TAKEN.items() for key in keys.split()},
    "amp": Refusal('apex is not used. Use `"bf16": {"enabled": true}`'),
    "communication_data_type": Refusal(
        "Use fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy(reduce_dtype=...))",
        harmless="fp32",
    ),
    "compression_training": Refusal(f"Compression has no counterpart. {IN_CODE} with torchao"),
    "curriculum_learning": Refusal(f"{IN_CODE}, as a sampler of the data loader"),
    "data_efficiency": Refusal(f"{IN_CODE}, as a sampler of the data loader"),
    "data_types.grad_accum_dtype": Refusal(
        "Gradients are kept in the dtype of the weights, which is float32. Leave it out", harmless="fp32"
    ),
    "eigenvalue": Refusal(IN_CODE),
    "elasticity": Refusal("Ranks do not come and go. Use notebook_launch(..., max_restarts=...)"),
    "fp16.fp16_master_weights_and_grads": Refusal("Weights are kept in float32. Leave it out"),
    "fp8": Refusal('Use mixed_precision="bf16"'),
    "gradient_predivide_factor": Refusal("Gradients are averaged exactly. Leave it out", harmless=1.0),
    "hybrid_engine": Refusal("Generate with the prepared model inside torch.no_grad()"),
    "inference": Refusal("Generate with the prepared model inside torch.no_grad()"),
    "moe": Refusal("Experts are sharded like other weights. Leave it out"),
    "msamp": Refusal('Use mixed_precision="bf16"'),
    "pipeline": Refusal(f"Pipeline parallelism has no counterpart. Shard the weights instead: {SHARDS}"),
    "prescale_gradients": Refusal("Gradients are averaged exactly. Leave it out"),
    "progressive_layer_drop": Refusal(IN_CODE),
    "quantize_training": Refusal(f"{IN_CODE} with torchao"),
    "sequence_parallel_size": Refusal("Sequence parallelism has no counterpart. Use activation checkpointing", 1),
    "sparse_attention": Refusal(f"{IN_CODE} with torch.nn.attention.flex_attention"),
    "sparse_gradients": Refusal("Use torch.nn.Embedding(sparse=False), which is the default"),
    "tensor_parallel": Refusal("Use ParallelismConfig(tp_size=...) beside the plugin", harmless={"autotp_size": 0}),
    "weight_quantization": Refusal(f"{IN_CODE} with torchao"),
    "zero_optimization.mics_shard_size": Refusal(f"Shards within groups of ranks are {SHARDS}", harmless=-1),
    "zero_optimization.offload_optimizer.ratio": Refusal(
        "The optimizer's state is offloaded as a whole. Leave it out", harmless=1.0
    ),
    "zero_optimization.zenflow": Refusal('Use `"offload_optimizer": {"device": "cpu"}` alone'),
    "zero_optimization.zero_hpz_partition_size": Refusal(f"Shards within groups of ranks are {SHARDS}", harmless=1),
    "zero_optimization.zero_quantized_gradients": Refusal(
        "Use a bf16 reduction: FullyShardedDataParallelPlugin("
        "mixed_precision_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": Refusal(f"{IN_CODE} with torchao"),
    "zero_optimization.zero_quantized_weights": Refusal('Use mixed_precision="bf16", which gathers weights in bf16'),
    "zero_optimization.zeropp_loco_param": Refusal("Leave it out"),
}


def check_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that only tune DeepSpeed and are left out, so that a line can name them.

    Raises:
        ValueError: A key asks for something that has no counterpart, or DeepSpeed does not know it.
    """
    left_out: list[str] = []
    for key, value in _leaves(config):
        rows = {name: KEYS[name] for name in _with_sections(key) if name in KEYS}
        name, refusal = next(((name, row) for name, row in rows.items() if isinstance(row, Refusal)), ("", None))
        if refusal is not None:
            if not (is_off(value) or value in (AUTO, refusal.harmless) or _section_is_off(config, name)):
                raise ValueError(
                    f"DeepSpeed's {key}={value!r} has no counterpart, and torch carries these settings out. "
                    f"{refusal.advice}; or run DeepSpeed itself, with deepspeed.initialize in the function."
                )
        elif CARRIED_OUT not in rows.values():
            _check_known(key)
            if rows.get(key) != UNTOLD and not is_off(value) and not _section_is_off(config, key):
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
        if isinstance(value, dict) and value and KEYS.get(key) != CARRIED_OUT:
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
    known = {name.split(".", maxsplit=1)[0] for name in KEYS}
    close = difflib.get_close_matches(section, known, n=1, cutoff=0.85)
    if section not in known and close:
        raise ValueError(f"DeepSpeed has no setting {section!r}. Did you mean {close[0]!r}?")
