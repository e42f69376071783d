"""The layout of a run: which ranks replicate a model, which share it out, and which read the same data."""

from __future__ import annotations

import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.settings.option_checks import GLOO_ON_GPUS, no_whole_replicas
from notebook_launcher.training.argument_checks import check_instance
from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin, sharding_is_asked_for
from notebook_launcher.training.parallelism.initial_weights import load_on_first
from notebook_launcher.training.parallelism.sizes import ParallelismConfig
from notebook_launcher.training.parallelism.tensor_parallel import share_generators
from notebook_launcher.training.process.environment import flag
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout", "make_layout"]


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
    other = config.non_data_parallel_size * (config.dp_shard_size or 1)
    fitting = num_processes // other if num_processes % other == 0 else 0
    advice = (
        f"Write ParallelismConfig(dp_replicate_size={fitting}, dp_shard_size={config.dp_shard_size}"
        f"{f', tp_size={config.tp_size}' if config.tp_enabled else ''}), or launch {config.total_size} ranks."
        if fitting
        else f"{other} does not divide {num_processes}; launch {config.total_size} ranks, or choose other sizes."
    )
    return f"ParallelismConfig: {config.multiply()}, but there are {num_processes} ranks. {advice}"


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
