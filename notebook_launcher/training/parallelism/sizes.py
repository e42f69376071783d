"""The sizes of a mesh of ranks, by Accelerate's names."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from notebook_launcher.settings.training_settings import OF_ENVIRONMENT, read_variable
from notebook_launcher.settings.whole_numbers import whole_number
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ParallelismConfig", "TorchTensorParallelConfig"]

PREFIX = "PARALLELISM_CONFIG_"
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
UNSUPPORTED_SIZES = {
    "cp_size": "context parallelism, which splits each sequence over ranks, is not supported: shorten the sequences, "
    "or shard with dp_shard_size and use activation_checkpointing=True",
    "sp_size": "sequence parallelism of DeepSpeed is not supported: shard with dp_shard_size and use "
    "activation_checkpointing=True",
}


@dataclasses.dataclass
class TorchTensorParallelConfig:
    """Settings of tensor parallelism by Accelerate's name, for `ParallelismConfig(tp_handler=...)`."""

    enable_async_tp: bool = False
    """Without effect, as in Accelerate."""

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warn_user(
                "TorchTensorParallelConfig(enable_async_tp=True): without effect, communication is not overlapped."
            )


@dataclasses.dataclass
class ParallelismConfig:
    """Sizes of the mesh of ranks; their product is the number of ranks.

    A size that is not given comes from a variable such as `PARALLELISM_CONFIG_DP_SHARD_SIZE`, else it is 1. With all
    sizes 1, every rank has the whole model.
    """

    dp_replicate_size: int | None = None
    """Replicas of the model. Each of them is sharded over `dp_shard_size` ranks."""
    dp_shard_size: int | None = None
    """Ranks that share out the parameters, gradients and optimizer state of one replica."""
    tp_size: int | None = None
    """Ranks that compute the layers of `tp_plan` together (tensor parallelism). They read the same data."""
    cp_size: int | None = None
    """Context parallelism; only 1 is supported."""
    cp_backend: str | None = None
    """Accepted and without effect."""
    sp_size: int | None = None
    """DeepSpeed's sequence parallelism; only 1 is supported."""
    sp_backend: str | None = None
    """Accepted and without effect."""
    tp_handler: TorchTensorParallelConfig | None = None
    """Settings of tensor parallelism; none of them has an effect."""
    cp_handler: Any = None
    sp_handler: Any = None
    tp_plan: Mapping[str, Any] | None = None
    """Layers that are cut over the ranks of a group, by name, each with its style: `"colwise"`, `"rowwise"`, or a
    `ParallelStyle` of torch. None: the model's own `tp_plan`, which models of transformers have."""

    def __post_init__(self) -> None:
        for name in SIZES:
            setattr(self, name, _size(name, getattr(self, name)))
        for name, why in UNSUPPORTED_SIZES.items():
            if getattr(self, name) > 1:
                raise ValueError(f"ParallelismConfig({name}={getattr(self, name)}): {why}.")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension of the mesh, outermost first: neighbouring ranks share the last ones."""
        names = ("dp_replicate", "dp_shard", "tp")
        return {name: int(getattr(self, f"{name}_size")) for name in names}

    @property
    def total_size(self) -> int:
        """The number of ranks that the sizes ask for."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that read different data."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that read the same data."""
        return self.sizes["tp"]

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if the model has several replicas."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if ranks share a replica out."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """True if ranks compute layers together."""
        return self.sizes["tp"] > 1

    @property
    def shards_models(self) -> bool:
        """True if no rank has a whole model."""
        return self.dp_shard_enabled or self.tp_enabled

    @property
    def cp_enabled(self) -> bool:
        """False: context parallelism is not supported."""
        return False

    @property
    def sp_enabled(self) -> bool:
        """False: sequence parallelism is not supported."""
        return False

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the dimensions that are larger than 1, outermost first."""
        return [name for name, size in self.sizes.items() if size > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Names of the active dimensions whose ranks read different data."""
        return [name for name in self.active_mesh_dims if name != "tp"]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Names of the active dimensions whose ranks read the same data."""
        return [name for name in self.active_mesh_dims if name == "tp"]

    def multiply(self) -> str:
        """Return the product of the sizes in words, for messages."""
        factors = [f"dp_replicate_size={self.dp_replicate_size}", f"dp_shard_size={self.dp_shard_size}"]
        if self.tp_enabled:
            factors.append(f"tp_size={self.tp_size}")
        return f"{' x '.join(factors)} = {self.total_size}"


def _size(name: str, value: Any) -> int:
    if value is not None:
        return whole_number(name, value)
    variable = PREFIX + name.upper()
    return whole_number(variable, read_variable(os.environ, variable, 1), hint=OF_ENVIRONMENT)
