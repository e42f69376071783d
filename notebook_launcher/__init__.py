"""Run distributed PyTorch from a notebook cell.

    from notebook_launcher import notebook_launch

    results = notebook_launch(train, 4)

Importing the package imports neither torch nor anything else that is slow, and starts nothing.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.context import report, track
    from notebook_launcher.errors import (
        CallOrderError,
        CaptureError,
        ConfigError,
        InternalError,
        LaunchError,
        MissingResultError,
        RankFailedError,
        ResourceError,
        ReturnValueError,
        RunStoppedError,
        RunTimeoutError,
    )
    from notebook_launcher.history.listing import open_run, runs
    from notebook_launcher.history.recorded import RecordedRun
    from notebook_launcher.kernel.launch import launch, notebook_launch, prewarm
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run import Run
    from notebook_launcher.kernel.session import Session
    from notebook_launcher.training.accelerator import Accelerator as Accelerator
    from notebook_launcher.training.accumulation.verify import AccumulationReport as AccumulationReport
    from notebook_launcher.training.checkpoints import CheckpointError as CheckpointError
    from notebook_launcher.training.checkpoints import load_model as load_model
    from notebook_launcher.training.checkpoints import save_model as save_model
    from notebook_launcher.training.data import prepare_data_loader as prepare_data_loader
    from notebook_launcher.training.data import skip_first_batches as skip_first_batches
    from notebook_launcher.training.device_memory import clear_device_cache as clear_device_cache
    from notebook_launcher.training.device_memory import find_executable_batch_size as find_executable_batch_size
    from notebook_launcher.training.device_memory import release_memory as release_memory
    from notebook_launcher.training.operations import broadcast as broadcast
    from notebook_launcher.training.operations import broadcast_object_list as broadcast_object_list
    from notebook_launcher.training.operations import gather as gather
    from notebook_launcher.training.operations import gather_object as gather_object
    from notebook_launcher.training.operations import pad_across_processes as pad_across_processes
    from notebook_launcher.training.operations import reduce as reduce
    from notebook_launcher.training.operations import send_to_device as send_to_device
    from notebook_launcher.training.plugins import AutocastKwargs as AutocastKwargs
    from notebook_launcher.training.plugins import DataLoaderConfiguration as DataLoaderConfiguration
    from notebook_launcher.training.plugins import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from notebook_launcher.training.plugins import DistributedType as DistributedType
    from notebook_launcher.training.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
    from notebook_launcher.training.plugins import GradScalerKwargs as GradScalerKwargs
    from notebook_launcher.training.plugins import InitProcessGroupKwargs as InitProcessGroupKwargs
    from notebook_launcher.training.plugins import ProfileKwargs as ProfileKwargs
    from notebook_launcher.training.plugins import ProjectConfiguration as ProjectConfiguration
    from notebook_launcher.training.process.process_state import ProcessState as ProcessState
    from notebook_launcher.training.random import set_seed as set_seed
    from notebook_launcher.training.random import synchronize_rng_states as synchronize_rng_states
    from notebook_launcher.training.recording.logging import get_logger as get_logger
    from notebook_launcher.training.recording.trackers import GeneralTracker as GeneralTracker
    from notebook_launcher.verification import VerificationReport, verify_accumulation

    PartialState = ProcessState

# `import *` brings what a kernel needs. What belongs to training is imported by its name: it imports torch.
__all__ = [
    "CallOrderError",
    "CaptureError",
    "ConfigError",
    "InternalError",
    "LaunchConfig",
    "LaunchError",
    "MissingResultError",
    "RankFailedError",
    "RecordedRun",
    "ResourceError",
    "Results",
    "ReturnValueError",
    "Run",
    "RunStoppedError",
    "RunTimeoutError",
    "Session",
    "VerificationReport",
    "launch",
    "notebook_launch",
    "open_run",
    "prewarm",
    "report",
    "runs",
    "track",
    "verify_accumulation",
]

__version__ = "0.1.0"

_ELSEWHERE = (
    "notebook_launcher is the name of the package. Type `from notebook_launcher import notebook_launch` and "
    "`notebook_launch(fn, 2, args=(...))`; or, for Accelerate's order of arguments, "
    "`from notebook_launcher.compat import notebook_launcher`."
)

# In a checkout, `widgets/` lies beside this folder; once installed, it lies in it (pyproject.toml,
# package-dir). This makes `import notebook_launcher.widgets` work in a checkout that is not installed.
_CHECKOUT = Path(__file__).resolve().parents[1]
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "widgets" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))

_HOMES = {
    "Accelerator": "training.accelerator",
    "AccumulationReport": "training.accumulation.verify",
    "AutocastKwargs": "training.plugins",
    "CheckpointError": "training.checkpoints",
    "DataLoaderConfiguration": "training.plugins",
    "DistributedDataParallelKwargs": "training.plugins",
    "DistributedType": "training.plugins",
    "GeneralTracker": "training.recording.trackers",
    "GradScalerKwargs": "training.plugins",
    "GradientAccumulationPlugin": "training.plugins",
    "InitProcessGroupKwargs": "training.plugins",
    "LaunchConfig": "config",
    "PartialState": "training.process.process_state",
    "ProcessState": "training.process.process_state",
    "ProfileKwargs": "training.plugins",
    "ProjectConfiguration": "training.plugins",
    "RecordedRun": "history.recorded",
    "Results": "kernel.results",
    "Run": "kernel.run",
    "Session": "kernel.session",
    "VerificationReport": "verification",
    "broadcast": "training.operations",
    "broadcast_object_list": "training.operations",
    "clear_device_cache": "training.device_memory",
    "find_executable_batch_size": "training.device_memory",
    "gather": "training.operations",
    "gather_object": "training.operations",
    "get_logger": "training.recording.logging",
    "launch": "kernel.launch",
    "load_model": "training.checkpoints",
    "notebook_launch": "kernel.launch",
    "open_run": "history.listing",
    "pad_across_processes": "training.operations",
    "prepare_data_loader": "training.data",
    "prewarm": "kernel.launch",
    "reduce": "training.operations",
    "release_memory": "training.device_memory",
    "report": "context",
    "runs": "history.listing",
    "save_model": "training.checkpoints",
    "send_to_device": "training.operations",
    "set_seed": "training.random",
    "skip_first_batches": "training.data",
    "synchronize_rng_states": "training.random",
    "track": "context",
    "verify_accumulation": "verification",
}

# Accelerate's name; it is not shared, since it has nothing to share but the process group.
_RENAMED = {"PartialState": "ProcessState"}


def __getattr__(name: str) -> Any:
    if name == "notebook_launcher":
        # Not an AttributeError, after which `from ... import` would look for a submodule.
        raise ImportError(_ELSEWHERE)
    if name not in _HOMES and name not in __all__:
        return _from_training(name)
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    return getattr(module, _RENAMED.get(name, name))


def _from_training(name: str) -> Any:
    """Find the rest of Accelerate's names, so that changing its import line is enough."""
    training = importlib.import_module(f"{__name__}.training")
    if name not in training.__all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(training, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOMES, "__version__"})
