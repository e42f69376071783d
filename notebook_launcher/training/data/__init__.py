"""Sharded data: each rank gets its part of every round, and knows how many of its samples are real."""

from __future__ import annotations

from notebook_launcher.training.accumulation.windows import ActiveLoaders
from notebook_launcher.training.data.dispatching import DataLoaderDispatcher
from notebook_launcher.training.data.iterables import IterableDatasetShard
from notebook_launcher.training.data.loader import DataLoaderStateMixin
from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import SkipDataLoader, prepare_data_loader, skip_first_batches
from notebook_launcher.training.data.rows import Round
from notebook_launcher.training.data.samplers import SeedableRandomSampler, get_sampler
from notebook_launcher.training.data.shard import DataLoaderShard
from notebook_launcher.training.data.sharding import BatchSamplerShard, SkipBatchSampler

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
