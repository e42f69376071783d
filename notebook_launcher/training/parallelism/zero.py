"""DeepSpeed's settings in torch's terms, settled with the call that they are given to."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher import context
from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.training.parallelism.deepspeed import AUTO, DeepSpeedPlugin, deepspeed_is_asked_for
from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_launcher.training.plugins import GradScalerKwargs, check_instance
from notebook_launcher.training.process.environment import read_place
from notebook_launcher.wording import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.settings.training_settings import SettingName
    from notebook_launcher.training.resolving import Settings


STAGES = {
    0: "every rank keeps a whole model",
    1: "optimizer state is sharded, and gradients are reduced once for each window",
    2: "gradients and optimizer state are sharded; parameters are freed after the backward",
    3: "parameters, gradients and optimizer state are sharded",
}
"""Effect of each stage, in words."""
PRECISIONS = {"fp16": ("fp16.enabled",), "bf16": ("bf16.enabled", "bfloat16.enabled")}
DTYPES = {"float16": "fp16", "fp16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
MAX_NAMED = 5


Given = tuple[Any, str]
"""A setting that the call gives beside DeepSpeed's, and its place, as the user wrote it:
`Accelerator(gradient_accumulation_steps=4)`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """The settings that a DeepSpeedPlugin comes to, for a number of ranks."""

    stage: int
    offloads: bool
    gradient_accumulation_steps: int | None
    """None: the file leaves it to the call."""
    max_grad_norm: float | None
    mixed_precision: str | None
    micro_batch_size: int | None
    """Samples of one rank in a micro-batch; None: any number."""
    scaler: GradScalerKwargs | None
    num_ranks: int
    left_out: tuple[str, ...]

    def describe(self) -> str:
        """Return one line about what happens to DeepSpeed's settings."""
        names = ", ".join(self.left_out[:MAX_NAMED])
        more = len(self.left_out) - MAX_NAMED
        names += f" and {more} more" if more > 0 else ""
        tuned = f" Without effect: {names}." if names else ""
        outcome = f"{STAGES[self.stage]}{', all of it on the CPU' if self.offloads else ''}"
        if self.num_ranks == 1:
            outcome = "on one rank nothing is sharded or offloaded"
        return f"DeepSpeed's settings are carried out by torch. ZeRO stage {self.stage}: {outcome}.{tuned}"

    def check_batch_sizes(self, sizes: Sequence[int]) -> None:
        """Raise ValueError if none of the prepared loaders has the micro-batches that the settings give."""
        if self.micro_batch_size is not None and sizes and self.micro_batch_size not in sizes:
            found = ", ".join(str(size) for size in sizes)
            raise ValueError(
                f"DeepSpeed's train_micro_batch_size_per_gpu={self.micro_batch_size}, but prepare() got a data loader "
                f"that gives each rank {found} samples. Write DataLoader(..., batch_size={self.micro_batch_size}), or "
                f'"{AUTO}" into DeepSpeed\'s settings.'
            )


def resolve_zero(
    plugin: DeepSpeedPlugin,
    *,
    num_ranks: int,
    given: Mapping[str, Given],
    scaler: GradScalerKwargs | None,
) -> ZeroSettings:
    """Return the resolved settings for this number of ranks.

    Args:
        plugin: DeepSpeed's settings.
        num_ranks: The number of ranks that read different data.
        given: What the call gives of `gradient_accumulation_steps`, `max_grad_norm` and `mixed_precision`.
        scaler: The arguments of the scaler that the call gives.

    Raises:
        ValueError: DeepSpeed's settings and the call differ, or the batch sizes do not multiply; the message has both
            values.
    """
    plugin.check()
    key = "gradient_accumulation_steps"
    steps = _agree(key, _number(plugin, key), given.get(key))
    settled_steps, micro = _settle_batches(plugin, None if steps is None else int(steps), num_ranks)
    norm = _agree("gradient_clipping", _number(plugin, "gradient_clipping"), given.get("max_grad_norm"))
    return ZeroSettings(
        stage=plugin.zero_stage,
        offloads="cpu" in (plugin.offload_optimizer_device, plugin.offload_param_device),
        gradient_accumulation_steps=settled_steps,
        max_grad_norm=float(norm) if norm else None,
        mixed_precision=_settle_precision(plugin, given.get("mixed_precision")),
        micro_batch_size=micro,
        scaler=_settle_scaler(plugin, scaler),
        num_ranks=num_ranks,
        left_out=plugin.left_out,
    )


def _agree(key: str, value: Any, given: Given | None) -> Any:
    """Return the settled value of a key; None if nothing gives one."""
    if given is None:
        return value
    if value is not None and given[0] != value:
        raise ValueError(
            f'DeepSpeed\'s {key}={value!r} and {given[1]} differ. Pass one of them, or write "{AUTO}" for {key} into '
            "DeepSpeed's settings."
        )
    return given[0]


def _number(plugin: DeepSpeedPlugin, key: str) -> Any:
    """Return a number in the settings; None if it is not given or `"auto"`."""
    value = plugin.get_value(key)
    if value in (None, AUTO):
        return None
    if key != "gradient_clipping":
        return whole_number(f"DeepSpeed's {key}", value, hint=f' It can be "{AUTO}", too.')
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(f'DeepSpeed\'s {key}={value!r} must be a number, 0 or more, or "{AUTO}".')
    return value


def _settle_batches(plugin: DeepSpeedPlugin, num_steps: int | None, num_ranks: int) -> tuple[int | None, int | None]:
    """Return accumulation steps and samples of a micro-batch; the whole batch gives a missing number."""
    micro = _number(plugin, "train_micro_batch_size_per_gpu")
    whole = _number(plugin, "train_batch_size")
    if whole is None:
        return num_steps, micro
    factors = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": num_steps}
    if micro is None and num_steps is None:
        factors["gradient_accumulation_steps"] = num_steps = 1
    known = (micro or 1) * (num_steps or 1) * num_ranks
    if whole % known or (micro is not None and num_steps is not None and whole != known):
        product = " x ".join(f"{name}={value}" for name, value in factors.items() if value is not None)
        relation = "is not" if micro is not None and num_steps is not None else "is not a multiple of"
        raise ValueError(
            f"DeepSpeed's train_batch_size={whole} {relation} {product} x {num_ranks} ranks = {known}. Write {known}, "
            f'or "{AUTO}" for one of them.'
        )
    rest = whole // known
    return (rest if num_steps is None else num_steps), (rest if micro is None else micro)


def _settle_precision(plugin: DeepSpeedPlugin, given: Given | None) -> str | None:
    switches = {name: [plugin.get_value(key) for key in keys] for name, keys in PRECISIONS.items()}
    chosen = {name for name, values in switches.items() if True in values}
    if plugin.get_value("torch_autocast.enabled") is True:
        dtype = str(plugin.get_value("torch_autocast.dtype", "bfloat16"))
        if dtype not in DTYPES:
            raise ValueError(unknown("DeepSpeed's torch_autocast.dtype", dtype, ("bfloat16", "float16")))
        chosen.add(DTYPES[dtype])
    if len(chosen) > 1:
        raise ValueError(f"DeepSpeed's settings enable both {' and '.join(sorted(chosen))}. Enable one.")
    if chosen:
        return str(_agree("precision", chosen.pop(), given))
    if given is not None and False in switches.get(given[0], ()):
        key = PRECISIONS[given[0]][0]
        raise ValueError(f'DeepSpeed\'s {key}=False and {given[1]} differ. Enable it there, or write "{AUTO}".')
    return None


def _settle_scaler(plugin: DeepSpeedPlugin, given: GradScalerKwargs | None) -> GradScalerKwargs | None:
    """Return the scaler's arguments by the section `fp16`; None if the section has none."""
    if plugin.get_value("fp16.loss_scale", 0) not in (0, AUTO):
        raise ValueError(
            f"DeepSpeed's fp16.loss_scale={plugin.get_value('fp16.loss_scale')!r}: a fixed scale has no counterpart. "
            "Write 0 for a dynamic one, and set its start by initial_scale_power."
        )
    power, interval = plugin.get_value("fp16.initial_scale_power"), plugin.get_value("fp16.loss_scale_window")
    arguments: dict[str, Any] = {}
    if power not in (None, AUTO):
        arguments["init_scale"] = 2.0**power
    if interval not in (None, AUTO):
        arguments["growth_interval"] = int(interval)
    if not arguments or plugin.get_value("fp16.enabled") is False:
        return given
    for name, value in arguments.items():
        if given is not None and getattr(given, name) != value:
            raise ValueError(
                f"DeepSpeed's fp16 section gives {name}={value}, and GradScalerKwargs {name}={getattr(given, name)}. "
                "Leave one of them out."
            )
    return dataclasses.replace(given or GradScalerKwargs(), **arguments)


# --------------------------------------------------------------------------------------------------------------------
# The arguments of an Accelerator after DeepSpeed's settings were taken over.


def apply_deepspeed(given: Settings) -> Settings:
    """Return the given settings with DeepSpeed's in them, those that `ACCELERATE_USE_DEEPSPEED` asks for included.

    Raises:
        TypeError: The plugin is not a DeepSpeedPlugin.
        ValueError: DeepSpeed's settings and the given ones differ; the message has both values.
    """
    plugin = given.deepspeed_plugin
    if plugin is None and given.fsdp_plugin is None and deepspeed_is_asked_for():
        plugin = DeepSpeedPlugin()
    if plugin is None:
        return given
    check_instance("deepspeed_plugin", plugin, DeepSpeedPlugin, "DeepSpeedPlugin(hf_ds_config='settings.json')")
    if given.fsdp_plugin is not None:
        raise ValueError(
            "Accelerator got both deepspeed_plugin and fsdp_plugin, and torch's fully_shard carries out either one. "
            "Pass one of them."
        )
    shard = context.setting("shard")
    if plugin.zero_stage == 0 and shard is not None and shard > 1:
        raise ValueError(
            f"DeepSpeed's zero_stage=0 keeps a whole model on each rank, but the launch's shard={shard} shares it out. "
            "Pass zero_stage=3, or leave shard out."
        )
    sizes, place = given.parallelism_config, read_place(os.environ)
    if dist.is_available() and dist.is_initialized():
        num_ranks = dist.get_world_size()
    else:
        num_ranks = 1 if place is None else place.num_processes
    accumulation = given.accumulation
    arguments: dict[SettingName, Any] = {
        "gradient_accumulation_steps": accumulation.num_steps,
        "max_grad_norm": given.max_grad_norm,
        "mixed_precision": given.mixed_precision,
    }
    zero = resolve_zero(
        plugin,
        num_ranks=num_ranks // (1 if sizes is None else sizes.non_data_parallel_size),
        given={name: found for name, value in arguments.items() if (found := _given(name, value)) is not None},
        scaler=given.scaler,
    )
    if zero.stage == 1 and accumulation.sync_each_batch is None:
        accumulation = dataclasses.replace(accumulation, sync_each_batch=False)
    if zero.gradient_accumulation_steps is not None:
        accumulation = dataclasses.replace(accumulation, num_steps=zero.gradient_accumulation_steps)
    return dataclasses.replace(
        given,
        deepspeed_plugin=plugin,
        zero=zero,
        mixed_precision=zero.mixed_precision or given.mixed_precision,
        accumulation=accumulation,
        max_grad_norm=zero.max_grad_norm or given.max_grad_norm,
        fsdp_plugin=None
        if zero.stage == 0
        else FullyShardedDataParallelPlugin(reshard_after_forward=zero.stage == 3, cpu_offload=zero.offloads),
        scaler=zero.scaler,
    )


def _given(name: SettingName, argument: Any) -> Given | None:
    """Return what was given: the argument, else the launch's option."""
    if argument is not None:
        return argument, f"Accelerator({name}={argument!r})"
    launched = context.setting(name)
    return None if launched is None else (launched, f"the launch's {name}={launched!r}")
