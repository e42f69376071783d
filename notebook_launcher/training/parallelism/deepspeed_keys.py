"""The keys of a DeepSpeed file: some are carried out by torch, some only tune DeepSpeed, and some are refused.

The lists follow DeepSpeed 0.19 (`deepspeed/runtime/config.py` and `deepspeed/runtime/zero/config.py`). A key with a
dot is inside a section: `zero_optimization.stage`.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["AUTO", "check_keys", "is_off", "value_at"]

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
