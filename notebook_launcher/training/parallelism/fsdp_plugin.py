"""The settings of sharding, by the names of Accelerate's FullyShardedDataParallelPlugin."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.wording import read_bool, unknown

PREFIX = "FSDP_"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's strategies; FSDP1 numbers them from 1."""
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
WITHOUT_EFFECT = {
    "use_orig_params": "FSDP2 always keeps the parameters",
    "sync_module_states": "rank 0's weights are always broadcast",
    "limit_all_gathers": "FSDP2 bounds its memory itself",
    "backward_prefetch": "FSDP2 prefetches by itself",
    "forward_prefetch": "FSDP2 prefetches by itself",
}
"""Settings of FSDP1 that FSDP2 has no use for, each with the reason."""


@dataclasses.dataclass
class FullyShardedDataParallelPlugin:
    """Settings of a sharded model. Torch's FSDP2 (`fully_shard`) carries them out, whatever `fsdp_version` is.

    A setting that is not given comes from a variable such as `FSDP_AUTO_WRAP_POLICY`, as `accelerate launch` sets them.
    """

    fsdp_version: int | None = None
    """1 or 2; 1 is Accelerate's default. Both give FSDP2, and FSDP1's settings are translated."""
    sharding_strategy: Any = None
    """FSDP1's name for how much is sharded: `"FULL_SHARD"`, `"SHARD_GRAD_OP"` (the same as
    `reshard_after_forward=False`), `"HYBRID_SHARD"` (a replica for each machine), `"HYBRID_SHARD_ZERO2"` (both) or
    `"NO_SHARD"`."""
    reshard_after_forward: Any = None
    """True: each unit's parameters are freed after its forward, and gathered again for its backward (ZeRO-3). False:
    they stay until the backward is over (ZeRO-2): less traffic, more memory. None: True. One of FSDP1's strategies is
    understood, too."""
    backward_prefetch: Any = None
    """Without effect."""
    mixed_precision_policy: Any = None
    """Precisions of parameters, reductions and outputs: torch's `MixedPrecisionPolicy`, a dictionary of its arguments,
    or `"bf16"`, `"fp16"`, `"fp32"`. None: by the Accelerator's `mixed_precision`, with reductions in float32."""
    auto_wrap_policy: Any = None
    """Modules that are units, whose parameters are gathered and freed together: `"transformer_based_wrap"`,
    `"size_based_wrap"`, `"no_wrap"` (the model as a whole), a collection of module classes, or one of torch's policies.
    None: the classes in the model's `_no_split_modules`, else repeated blocks in a `ModuleList` or `Sequential`."""
    cpu_offload: Any = None
    """True if parameters, gradients and optimizer state live on the CPU, and parameters visit the device to compute."""
    ignored_modules: Any = None
    """Modules that stay whole on each rank, or a pattern that all of a module's name matches. Their gradients are
    averaged over the ranks."""
    state_dict_type: Any = None
    """Layout of checkpoints: `"FULL_STATE_DICT"` or `"SHARDED_STATE_DICT"`. None: chosen by size."""
    state_dict_config: Any = None
    """Accepted and without effect."""
    optim_state_dict_config: Any = None
    """Accepted and without effect."""
    limit_all_gathers: bool = True
    """Without effect."""
    use_orig_params: bool | None = None
    """Without effect."""
    param_init_fn: Any = None
    """Called with each module that has parameters on the meta device on all ranks, to give them values on rank 0.
    None: the module's `reset_parameters`."""
    sync_module_states: bool | None = None
    """Without effect."""
    forward_prefetch: bool | None = None
    """Without effect."""
    activation_checkpointing: bool | None = None
    """True if units keep their inputs alone, and compute their activations again in the backward."""
    activation_checkpointing_offload: bool | None = None
    """Not supported."""
    cpu_ram_efficient_loading: bool | None = None
    """True if the Accelerator sets the two variables at which `from_pretrained` of transformers reads weights on rank 0
    alone. `prepare` gives rank 0's weights to the others in any case, one unit at a time. transformers 5.23 heeds the
    variables in part: it reads the file on every rank."""
    transformer_cls_names_to_wrap: Any = None
    """Names of the classes that are units with `"transformer_based_wrap"`. None: the model's `_no_split_modules`."""
    min_num_params: int | None = None
    """The fewest parameters of a unit with `"size_based_wrap"`."""

    def __post_init__(self) -> None:
        self.dropped = tuple(name for name in WITHOUT_EFFECT if _is_set(name, getattr(self, name)))
        """The settings that were given and have no effect."""
        self.fsdp_version = int(self._given("fsdp_version", "VERSION") or 2)
        self._settle_strategy()
        offload = self._given("cpu_offload", "OFFLOAD_PARAMS")
        if not (offload is None or isinstance(offload, (bool, str))):
            # Torch's CPUOffloadPolicy of FSDP2, or CPUOffload of FSDP1; its OffloadPolicy means no offload.
            offload = bool(getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy"))
        self.cpu_offload = _switch("cpu_offload", offload)
        policy = self._given("auto_wrap_policy")
        if isinstance(policy, str):
            policy = _choice("auto_wrap_policy", policy, WRAP_POLICIES)
        self.auto_wrap_policy = policy
        self.transformer_cls_names_to_wrap = _names(
            self._given("transformer_cls_names_to_wrap", "TRANSFORMER_CLS_TO_WRAP")
        )
        if (fewest := self._given("min_num_params")) is not None:
            fewest = int(fewest) if isinstance(fewest, str) and fewest.strip().isdecimal() else fewest
            self.min_num_params = whole_number("min_num_params", fewest, minimum=0)
        self.ignored_modules = self._given("ignored_modules")
        self.state_dict_type = _layout(self._given("state_dict_type"))
        for name in ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"):
            setattr(self, name, _switch(name, self._given(name)))
        if self.activation_checkpointing_offload:
            raise ValueError(
                "activation_checkpointing_offload=True is not supported. Use activation_checkpointing=True, or torch's "
                "save_on_cpu around the forward."
            )
        self.mixed_precision_policy = _precision_policy(self.mixed_precision_policy)

    def _given(self, name: str, variable: str = "") -> Any:
        """Return a setting, else the text of its variable, else None."""
        value = getattr(self, name)
        text = os.environ.get(PREFIX + (variable or name.upper())) if value is None else None
        return value if text is None or text == "" else text

    def _settle_strategy(self) -> None:
        """Read the strategy and `reshard_after_forward`, which FSDP1 takes for the same."""
        strategy = self._given("sharding_strategy")
        reshard = self._given("reshard_after_forward")
        if reshard is not None and str(reshard).lower() not in ("true", "false"):
            if strategy is not None and _strategy(strategy) != _strategy(reshard):
                raise ValueError(
                    f"sharding_strategy={strategy!r} and reshard_after_forward={reshard!r} differ. Pass one."
                )
            strategy, reshard = reshard, None
        self.sharding_strategy = None if strategy is None else _strategy(strategy)
        by_strategy = self.sharding_strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        self.reshard_after_forward = by_strategy if reshard is None else str(reshard).lower() == "true"

    @property
    def checkpoint_layout(self) -> str | None:
        """The layout of the next checkpoint, as it was chosen or assigned; None: by size.

        Raises:
            ValueError: As `set_state_dict_type`.
        """
        return _layout(self.state_dict_type)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose the layout of the next checkpoints, as before the last save of a training.

        Args:
            state_dict_type: `"FULL_STATE_DICT"`, `"SHARDED_STATE_DICT"`, or torch's name for it. None: unchanged.

        Raises:
            ValueError: The layout is unknown, or not supported.
        """
        if state_dict_type is not None:
            self.state_dict_type = _layout(state_dict_type)

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Do nothing, for code that calls it before `prepare`: that finds the units in the model by the policy."""


def sharding_is_asked_for() -> bool:
    """Return True if `ACCELERATE_USE_FSDP` asks for sharding, as `accelerate launch` does."""
    return _switch("ACCELERATE_USE_FSDP", os.environ.get("ACCELERATE_USE_FSDP") or None)


def _is_set(name: str, value: Any) -> bool:
    if name == "limit_all_gathers":
        return value is not True
    return value is not None and str(value).upper() != "NO_PREFETCH"


def _strategy(value: Any) -> str:
    number = str(getattr(value, "value", value))
    if number.isdecimal() and 1 <= int(number) <= len(STRATEGIES):
        return STRATEGIES[int(number) - 1]
    text = str(getattr(value, "name", value)).upper()
    return _choice("sharding_strategy", "HYBRID_SHARD_ZERO2" if text == "_HYBRID_SHARD_ZERO2" else text, STRATEGIES)


def _layout(value: Any) -> str | None:
    if value is None:
        return None
    text = str(getattr(value, "name", value)).upper()
    if text == "LOCAL_STATE_DICT":
        raise ValueError(
            "state_dict_type='LOCAL_STATE_DICT' is not supported: only the same number of ranks could load it. Use "
            "'SHARDED_STATE_DICT'."
        )
    return _choice("state_dict_type", text, STATE_DICT_TYPES)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    text = value.upper()
    if text in choices:
        return text
    raise ValueError(unknown(name, value, choices))


def _switch(name: str, value: Any) -> bool:
    found = False if value is None else read_bool(str(value))
    if found is None:
        raise ValueError(f"{name}={value!r} must be True or False.")
    return found


def _names(value: Any) -> list[str] | None:
    if value is None:
        return None
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else list(value)


def _precision_policy(value: Any) -> Any:
    """Return the given policy as torch's."""
    if value is None:
        return None
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    if isinstance(value, str):
        if value not in dtypes:
            raise ValueError(f"mixed_precision_policy={value!r} is unknown. It can be {', '.join(map(repr, dtypes))}.")
        return MixedPrecisionPolicy(param_dtype=dtypes[value], reduce_dtype=torch.float32, output_dtype=torch.float32)
    if not isinstance(value, dict):
        # FSDP1's record has the same names, and buffer_dtype.
        names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        value = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not value:
        raise ValueError(
            f"mixed_precision_policy has none of its entries. It can be {', '.join(map(repr, dtypes))}, torch's "
            "MixedPrecisionPolicy, or a dictionary of its fields, such as param_dtype."
        )
    given: dict[str, Any] = {
        name: dtypes.get(dtype, dtype) if isinstance(dtype, str) else dtype
        for name, dtype in value.items()
        if name != "buffer_dtype"
    }
    return MixedPrecisionPolicy(**given)
