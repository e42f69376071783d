"""Training in a rank, or in one process without a launcher: the Accelerator and what belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.facade import LazyNames

if TYPE_CHECKING:
    from notebook_launcher.training.accelerator import Accelerator as Accelerator
    from notebook_launcher.training.accumulation.local_sgd import LocalSGD as LocalSGD
    from notebook_launcher.training.accumulation.updates import AcceleratedOptimizer as AcceleratedOptimizer
    from notebook_launcher.training.accumulation.updates import AcceleratedScheduler as AcceleratedScheduler
    from notebook_launcher.training.accumulation.verify import AccumulationReport as AccumulationReport
    from notebook_launcher.training.accumulation.windows import GradientState as GradientState
    from notebook_launcher.training.checkpoints import CheckpointError as CheckpointError
    from notebook_launcher.training.checkpoints import load as load
    from notebook_launcher.training.checkpoints import load_model as load_model
    from notebook_launcher.training.checkpoints import save as save
    from notebook_launcher.training.checkpoints import save_model as save_model
    from notebook_launcher.training.data.dispatching import DataLoaderDispatcher as DataLoaderDispatcher
    from notebook_launcher.training.data.iterables import IterableDatasetShard as IterableDatasetShard
    from notebook_launcher.training.data.loader import DataLoaderStateMixin as DataLoaderStateMixin
    from notebook_launcher.training.data.prepare import SkipDataLoader as SkipDataLoader
    from notebook_launcher.training.data.prepare import prepare_data_loader as prepare_data_loader
    from notebook_launcher.training.data.prepare import skip_first_batches as skip_first_batches
    from notebook_launcher.training.data.samplers import SeedableRandomSampler as SeedableRandomSampler
    from notebook_launcher.training.data.shard import DataLoaderShard as DataLoaderShard
    from notebook_launcher.training.data.sharding import BatchSamplerShard as BatchSamplerShard
    from notebook_launcher.training.data.sharding import SkipBatchSampler as SkipBatchSampler
    from notebook_launcher.training.device_memory import clear_device_cache as clear_device_cache
    from notebook_launcher.training.device_memory import find_executable_batch_size as find_executable_batch_size
    from notebook_launcher.training.device_memory import release_memory as release_memory
    from notebook_launcher.training.device_memory import should_reduce_batch_size as should_reduce_batch_size
    from notebook_launcher.training.operations import DistributedOperationException as DistributedOperationException
    from notebook_launcher.training.operations import TensorInformation as TensorInformation
    from notebook_launcher.training.operations import broadcast as broadcast
    from notebook_launcher.training.operations import broadcast_object_list as broadcast_object_list
    from notebook_launcher.training.operations import concatenate as concatenate
    from notebook_launcher.training.operations import convert_to_fp32 as convert_to_fp32
    from notebook_launcher.training.operations import copy_tensor_to_devices as copy_tensor_to_devices
    from notebook_launcher.training.operations import find_batch_size as find_batch_size
    from notebook_launcher.training.operations import find_device as find_device
    from notebook_launcher.training.operations import gather as gather
    from notebook_launcher.training.operations import gather_object as gather_object
    from notebook_launcher.training.operations import get_data_structure as get_data_structure
    from notebook_launcher.training.operations import honor_type as honor_type
    from notebook_launcher.training.operations import initialize_tensors as initialize_tensors
    from notebook_launcher.training.operations import listify as listify
    from notebook_launcher.training.operations import pad_across_processes as pad_across_processes
    from notebook_launcher.training.operations import pad_input_tensors as pad_input_tensors
    from notebook_launcher.training.operations import recursively_apply as recursively_apply
    from notebook_launcher.training.operations import reduce as reduce
    from notebook_launcher.training.operations import send_to_device as send_to_device
    from notebook_launcher.training.operations import slice_tensors as slice_tensors
    from notebook_launcher.training.parallelism.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from notebook_launcher.training.parallelism.fsdp_plugin import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from notebook_launcher.training.parallelism.mesh import ParallelismConfig as ParallelismConfig
    from notebook_launcher.training.plugins import AutocastKwargs as AutocastKwargs
    from notebook_launcher.training.plugins import DataLoaderConfiguration as DataLoaderConfiguration
    from notebook_launcher.training.plugins import DDPCommunicationHookType as DDPCommunicationHookType
    from notebook_launcher.training.plugins import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from notebook_launcher.training.plugins import DistributedType as DistributedType
    from notebook_launcher.training.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
    from notebook_launcher.training.plugins import GradScalerKwargs as GradScalerKwargs
    from notebook_launcher.training.plugins import InitProcessGroupKwargs as InitProcessGroupKwargs
    from notebook_launcher.training.plugins import KwargsHandler as KwargsHandler
    from notebook_launcher.training.plugins import LoggerType as LoggerType
    from notebook_launcher.training.plugins import PrecisionType as PrecisionType
    from notebook_launcher.training.plugins import ProfileKwargs as ProfileKwargs
    from notebook_launcher.training.plugins import ProjectConfiguration as ProjectConfiguration
    from notebook_launcher.training.plugins import RNGType as RNGType
    from notebook_launcher.training.process.environment import clear_environment as clear_environment
    from notebook_launcher.training.process.environment import patch_environment as patch_environment
    from notebook_launcher.training.process.process_state import AcceleratorState as AcceleratorState
    from notebook_launcher.training.process.process_state import ProcessState as ProcessState
    from notebook_launcher.training.process.process_state import wait_for_everyone as wait_for_everyone
    from notebook_launcher.training.random import set_seed as set_seed
    from notebook_launcher.training.random import synchronize_rng_state as synchronize_rng_state
    from notebook_launcher.training.random import synchronize_rng_states as synchronize_rng_states
    from notebook_launcher.training.recording.logged_values import histogram as histogram
    from notebook_launcher.training.recording.logging import get_logger as get_logger
    from notebook_launcher.training.recording.logging import tqdm as tqdm
    from notebook_launcher.training.recording.tracker_classes import GeneralTracker as GeneralTracker
    from notebook_launcher.training.recording.tracker_classes import JSONLinesTracker as JSONLinesTracker
    from notebook_launcher.training.recording.tracker_classes import TensorBoardTracker as TensorBoardTracker
    from notebook_launcher.training.recording.tracker_clients import AimTracker as AimTracker
    from notebook_launcher.training.recording.tracker_clients import ClearMLTracker as ClearMLTracker
    from notebook_launcher.training.recording.tracker_clients import CometMLTracker as CometMLTracker
    from notebook_launcher.training.recording.tracker_clients import DVCLiveTracker as DVCLiveTracker
    from notebook_launcher.training.recording.tracker_clients import MLflowTracker as MLflowTracker
    from notebook_launcher.training.recording.tracker_clients import SwanLabTracker as SwanLabTracker
    from notebook_launcher.training.recording.tracker_clients import TrackioTracker as TrackioTracker
    from notebook_launcher.training.recording.tracker_clients import WandBTracker as WandBTracker
    from notebook_launcher.training.recording.trackers import register_tracker_class as register_tracker_class
    from notebook_launcher.training.unwrapping import extract_model_from_parallel as extract_model_from_parallel

_NAMES = LazyNames(__name__)

__all__ = sorted(_NAMES.homes)  # noqa: PLE0605 - named once, above
__getattr__, __dir__ = _NAMES.find, _NAMES.listed
