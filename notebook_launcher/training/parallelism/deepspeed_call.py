"""The arguments of an Accelerator after DeepSpeed's settings were taken over."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher import context
from notebook_launcher.training.argument_checks import check_instance
from notebook_launcher.training.parallelism.deepspeed import DeepSpeedPlugin, deepspeed_is_asked_for
from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_launcher.training.parallelism.zero import GivenSetting, resolve_zero
from notebook_launcher.training.process.environment import read_place

if TYPE_CHECKING:
    from notebook_launcher.settings.training_settings import SettingName
    from notebook_launcher.training.accelerator_arguments import AcceleratorArguments
    from notebook_launcher.training.parallelism.zero import ZeroSettings

__all__ = ["announce_zero", "apply_deepspeed"]


def apply_deepspeed(
    plugin: DeepSpeedPlugin | None, given: AcceleratorArguments
) -> tuple[DeepSpeedPlugin | None, ZeroSettings | None, AcceleratorArguments]:
    """Return the plugin, its settings in torch's terms, and the given arguments with DeepSpeed's settings in them.

    Args:
        plugin: DeepSpeed's settings. None: the settings that `ACCELERATE_USE_DEEPSPEED` asks for, if any.
        given: The arguments of the Accelerator.

    Raises:
        TypeError: `plugin` is not a DeepSpeedPlugin.
        ValueError: DeepSpeed's settings and the given arguments differ; the message has both values.
    """
    if plugin is None and given.fsdp_plugin is None and deepspeed_is_asked_for():
        plugin = DeepSpeedPlugin()
    if plugin is None:
        return None, None, given
    check_instance("deepspeed_plugin", plugin, DeepSpeedPlugin, "DeepSpeedPlugin(hf_ds_config='settings.json')")
    if given.fsdp_plugin is not None:
        raise ValueError(
            "Accelerator got both deepspeed_plugin and fsdp_plugin, and torch's fully_shard carries out either one. "
            "Pass one of them."
        )
    zero = _resolve_zero(plugin, given)
    return plugin, zero, _with_settings(given, zero)


def announce_zero(zero: ZeroSettings | None) -> None:
    """Report in one line of the run that torch carries the settings out."""
    if zero is not None:
        context.notify(f"Accelerator(): {zero.describe()}")


def _resolve_zero(plugin: DeepSpeedPlugin, given: AcceleratorArguments) -> ZeroSettings:
    shard = context.setting("shard")
    if plugin.zero_stage == 0 and shard is not None and shard > 1:
        raise ValueError(
            f"DeepSpeed's zero_stage=0 keeps a whole model on each rank, but the launch's shard={shard} shares it out. "
            "Pass zero_stage=3, or leave shard out."
        )
    sizes = given.parallelism_config
    same_data = 1 if sizes is None else sizes.non_data_parallel_size
    return resolve_zero(
        plugin,
        num_ranks=_num_ranks() // same_data,
        num_steps=_asked("gradient_accumulation_steps", given.accumulation.num_steps),
        max_grad_norm=_asked("max_grad_norm", given.max_grad_norm),
        mixed_precision=_asked("mixed_precision", given.mixed_precision),
        scaler=given.scaler,
    )


def _with_settings(given: AcceleratorArguments, zero: ZeroSettings) -> AcceleratorArguments:
    accumulation = given.accumulation
    if zero.stage == 1 and accumulation.sync_each_batch is None:
        accumulation = dataclasses.replace(accumulation, sync_each_batch=False)
    if zero.gradient_accumulation_steps is not None:
        accumulation = dataclasses.replace(accumulation, num_steps=zero.gradient_accumulation_steps)
    return dataclasses.replace(
        given,
        mixed_precision=zero.mixed_precision or given.mixed_precision,
        accumulation=accumulation,
        max_grad_norm=zero.max_grad_norm or given.max_grad_norm,
        fsdp_plugin=_fsdp_plugin(zero),
        scaler=zero.scaler,
    )


def _fsdp_plugin(zero: ZeroSettings) -> FullyShardedDataParallelPlugin | None:
    if zero.stage == 0:
        return None
    return FullyShardedDataParallelPlugin(reshard_after_forward=zero.stage == 3, cpu_offload=zero.offloads)


def _num_ranks() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    place = read_place(os.environ)
    return 1 if place is None else place.num_processes


def _asked(name: SettingName, argument: Any) -> list[GivenSetting]:
    """Return what was given: the argument, else the launch's option."""
    if argument is not None:
        return [GivenSetting(value=argument, where=f"Accelerator({name}={argument!r})")]
    launched = context.setting(name)
    return [] if launched is None else [GivenSetting(value=launched, where=f"the launch's {name}={launched!r}")]
