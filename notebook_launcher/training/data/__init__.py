"""Sharded data: each rank gets its part of every round, and knows how many of its samples are real."""

from __future__ import annotations

from notebook_launcher.training.data.active_loaders import ActiveLoaders
from notebook_launcher.training.data.dispatching.dispatcher import DataLoaderDispatcher
from notebook_launcher.training.data.iterables.iterable import IterableDatasetShard
from notebook_launcher.training.data.loaders.mixin import DataLoaderStateMixin
from notebook_launcher.training.data.loaders.resuming import SkipDataLoader, skip_first_batches
from notebook_launcher.training.data.loaders.shard import DataLoaderShard
from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import prepare_data_loader
from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.sampling.samplers import SeedableRandomSampler, get_sampler
from notebook_launcher.training.data.sampling.sharding import BatchSamplerShard
from notebook_launcher.training.data.sampling.skipping import SkipBatchSampler

__all__ = [
    "ActiveLoaders",
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "Round",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "gather_for_metrics",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
