"""The layout of a run: which ranks replicate a model, which share it out, and which read the same data."""

from __future__ import annotations

import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.settings.option_checks import GLOO_ON_GPUS, no_whole_replicas, whole_number
from notebook_launcher.settings.training_settings import OF_ENVIRONMENT, read_variable
from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin, sharding_is_asked_for
from notebook_launcher.training.parallelism.sharded_models import load_on_first
from notebook_launcher.training.parallelism.tensor_parallel import share_generators
from notebook_launcher.training.plugins import check_instance
from notebook_launcher.training.process.environment import flag
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The mesh of ranks, and this rank's place in it."""

    sizes: ParallelismConfig
    """The sizes of the mesh, settled: their product is the number of ranks."""
    plugin: FullyShardedDataParallelPlugin | None
    """The settings of sharded models; None if models are not sharded."""
    mesh: DeviceMesh | None
    """The active dimensions of the mesh; None where every rank has the whole model."""
    process_index: int

    @property
    def shards(self) -> bool:
        """True if prepared models are sharded."""
        return self.sizes.shards_models

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The dimensions that `fully_shard` takes: (replicate, shard), or shard alone."""
        assert self.mesh is not None
        return self.mesh["dp_replicate", "dp_shard"] if self.sizes.dp_replicate_enabled else self.mesh["dp_shard"]

    @property
    def shard_group(self) -> Any:
        """The process group of the ranks that share out one replica, this one among them."""
        assert self.mesh is not None
        return self.mesh["dp_shard"].get_group()

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks that read different data: every count of accumulation runs over these."""
        return self.sizes.data_parallel_size

    @property
    def data_rank(self) -> int:
        """This rank's number among the ranks that read different data."""
        return self.process_index // self.sizes.non_data_parallel_size

    def rank_in(self, dimension: str) -> int:
        """Return this rank's number along a dimension of the mesh; 0 if the mesh has none of that name."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return self.mesh.get_local_rank(dimension) if self.mesh is not None and dimension in names else 0

    @property
    def data_group(self) -> Any:
        """The process group of the ranks that read different data, this one among them; None: the default group."""
        if self.mesh is None or not self.sizes.tp_enabled:
            return None
        return _data_mesh(self.mesh, self.sizes).get_group()


def make_layout(
    config: ParallelismConfig | None,
    plugin: FullyShardedDataParallelPlugin | None,
    *,
    launched: int | None,
    num_processes: int,
    process_index: int,
    device: torch.device,
) -> Layout:
    """Settle the sizes of the mesh, and make it; every rank calls this together.

    Args:
        config: The sizes that the code gives.
        plugin: The settings of sharding that the code gives; with them alone, all ranks share one model out.
        launched: The launch's `shard`.
        num_processes: The number of ranks.
        process_index: This rank.
        device: The device that this rank computes on.

    Raises:
        ValueError: The sizes do not multiply to the number of ranks; the message does the sum.
        TypeError: An argument is not such a record.
        RuntimeError: Models would be shared out over GPUs by gloo.
    """
    check_instance("parallelism_config", config, ParallelismConfig, "ParallelismConfig(dp_shard_size=2)")
    check_instance("fsdp_plugin", plugin, FullyShardedDataParallelPlugin, "FullyShardedDataParallelPlugin()")
    load_on_first(False)  # what an earlier Accelerator asked for
    if config is None and flag(os.environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    if plugin is None and sharding_is_asked_for():
        plugin = FullyShardedDataParallelPlugin()
    sizes = _settle(config, plugin, launched, num_processes)
    if not sizes.shards_models:
        if plugin is not None and plugin.cpu_offload and process_index == 0:
            warn_user(
                "FullyShardedDataParallelPlugin(cpu_offload=True) has no effect here: "
                f"{'one process' if num_processes == 1 else 'every rank'} keeps whole models, which stay on {device}."
            )
        plugin = None
    elif plugin is None:
        plugin = FullyShardedDataParallelPlugin()
    if sizes.shards_models and device.type == "cuda" and "cuda:gloo" in dist.get_backend_config():
        raise RuntimeError(f"sharding of models on GPUs with gloo, {GLOO_ON_GPUS}")
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        load_on_first(True)
    mesh = _make_mesh(sizes, device) if sizes.shards_models else None
    if mesh is not None and sizes.tp_enabled:
        share_generators(mesh["tp"].get_group())
    return Layout(sizes=sizes, plugin=plugin, mesh=mesh, process_index=process_index)


def _settle(
    config: ParallelismConfig | None,
    plugin: FullyShardedDataParallelPlugin | None,
    launched: int | None,
    num_processes: int,
) -> ParallelismConfig:
    config = config or ParallelismConfig()
    if config.total_size == 1:
        shard = _shard_size(plugin, launched, num_processes)
        return dataclasses.replace(config, dp_replicate_size=num_processes // shard, dp_shard_size=shard)
    if config.total_size != num_processes:
        raise ValueError(_explain_sum(config, num_processes))
    if plugin is not None and not config.shards_models and plugin.sharding_strategy != "NO_SHARD":
        raise ValueError(
            f"fsdp_plugin was given, but with ParallelismConfig(dp_replicate_size={config.dp_replicate_size}, "
            f"dp_shard_size=1) every rank has a whole model. Write ParallelismConfig(dp_shard_size={num_processes}), "
            "or leave fsdp_plugin out."
        )
    return config


def _shard_size(plugin: FullyShardedDataParallelPlugin | None, launched: int | None, num_processes: int) -> int:
    """Return the number of ranks that share a model out, where no sizes were given."""
    strategy = None if plugin is None else plugin.sharding_strategy
    if num_processes == 1 or strategy == "NO_SHARD":
        return 1
    if launched is not None:
        if num_processes % launched:
            raise ValueError(f"{no_whole_replicas(launched, num_processes, f'{num_processes} ranks')}.")
        return launched
    if plugin is None:
        return 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or num_processes)
    if strategy is not None and strategy.startswith("HYBRID") and num_processes % local == 0:
        return local
    return num_processes


def _explain_sum(config: ParallelismConfig, num_processes: int) -> str:
    inner = [f"dp_shard_size={config.dp_shard_size}", *([f"tp_size={config.tp_size}"] if config.tp_enabled else [])]
    other = config.total_size // config.sizes["dp_replicate"]
    if num_processes % other:
        advice = f"{other} does not divide {num_processes}; launch {config.total_size} ranks, or choose other sizes."
    else:
        sizes = ", ".join([f"dp_replicate_size={num_processes // other}", *inner])
        advice = f"Write ParallelismConfig({sizes}), or launch {config.total_size} ranks."
    product = " x ".join([f"dp_replicate_size={config.dp_replicate_size}", *inner])
    return f"ParallelismConfig: {product} = {config.total_size}, but there are {num_processes} ranks. {advice}"


_MESHES: weakref.WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()
"""The meshes over each default process group. Their groups keep sockets open, and it is unknown when a group that an
Accelerator made is out of use; so each further Accelerator of a process shares them."""


def _make_mesh(sizes: ParallelismConfig, device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    # Beside tensor parallelism, fully_shard holds also what one rank has alone, so that all of it is reduced alike.
    names = tuple(
        name for name in sizes.sizes if name in sizes.active_mesh_dims or (name == "dp_shard" and sizes.tp_enabled)
    )
    shape = tuple(sizes.sizes[name] for name in names)
    meshes = _MESHES.setdefault(dist.group.WORLD, {})
    key = device.type, shape, names
    if key not in meshes:
        meshes[key] = init_device_mesh(device.type, shape, mesh_dim_names=names)
        if sizes.tp_enabled:
            _data_mesh(meshes[key], sizes)  # makes a group, in which every rank takes part
    return meshes[key]


def _data_mesh(mesh: DeviceMesh, sizes: ParallelismConfig) -> DeviceMesh:
    """Return the ranks that read different data, in one dimension."""
    if not sizes.dp_replicate_enabled:
        return mesh["dp_shard"]
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")  # noqa: SLF001 - torch documents it


# --------------------------------------------------------------------------------------------------------------------
# The sizes of a mesh of ranks, by Accelerate's names.


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


def _size(name: str, value: Any) -> int:
    if value is not None:
        return whole_number(name, value)
    variable = PREFIX + name.upper()
    return whole_number(variable, read_variable(os.environ, variable, 1), hint=OF_ENVIRONMENT)
