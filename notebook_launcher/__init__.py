"""Run distributed PyTorch from a notebook cell.

    from notebook_launcher import notebook_launch

    results = notebook_launch(train, 4)

Importing the package imports neither torch nor anything else that is slow, and starts nothing.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.facade import LazyNames

if TYPE_CHECKING:
    from notebook_launcher.archive.listing import open_run as open_run
    from notebook_launcher.archive.recorded import RecordedRun as RecordedRun
    from notebook_launcher.config import LaunchConfig as LaunchConfig
    from notebook_launcher.detached.attached_run import AttachedRun as AttachedRun
    from notebook_launcher.detached.attached_session import AttachedSession as AttachedSession
    from notebook_launcher.detached.attaching import attach as attach
    from notebook_launcher.detached.attaching import attach_session as attach_session
    from notebook_launcher.detached.attaching import runs as runs
    from notebook_launcher.diagnosis.doctor import doctor as doctor
    from notebook_launcher.diagnosis.finding import Diagnosis as Diagnosis
    from notebook_launcher.diagnosis.finding import Finding as Finding
    from notebook_launcher.engines.cluster.command_engines import SSH as SSH
    from notebook_launcher.engines.cluster.command_engines import Commands as Commands
    from notebook_launcher.engines.cluster.command_engines import Slurm as Slurm
    from notebook_launcher.engines.cluster.ray_engine import Ray as Ray
    from notebook_launcher.errors import CallOrderError as CallOrderError
    from notebook_launcher.errors import CaptureError as CaptureError
    from notebook_launcher.errors import ConfigError as ConfigError
    from notebook_launcher.errors import InternalError as InternalError
    from notebook_launcher.errors import LaunchError as LaunchError
    from notebook_launcher.errors import MissingResultError as MissingResultError
    from notebook_launcher.errors import NodeLostError as NodeLostError
    from notebook_launcher.errors import NoSuchRankError as NoSuchRankError
    from notebook_launcher.errors import RankFailedError as RankFailedError
    from notebook_launcher.errors import ResourceError as ResourceError
    from notebook_launcher.errors import ReturnValueError as ReturnValueError
    from notebook_launcher.errors import RunFolderError as RunFolderError
    from notebook_launcher.errors import RunStoppedError as RunStoppedError
    from notebook_launcher.errors import RunTimeoutError as RunTimeoutError
    from notebook_launcher.exporting import Exported as Exported
    from notebook_launcher.exporting import export as export
    from notebook_launcher.kernel.launch import launch as launch
    from notebook_launcher.kernel.launch import live_runs as live_runs
    from notebook_launcher.kernel.launch import notebook_launch as notebook_launch
    from notebook_launcher.kernel.launch import prewarm as prewarm
    from notebook_launcher.kernel.results import Results as Results
    from notebook_launcher.kernel.run.handle import Run as Run
    from notebook_launcher.kernel.session import Session as Session
    from notebook_launcher.reporting import report as report
    from notebook_launcher.reporting import track as track
    from notebook_launcher.reporting import tunable as tunable
    from notebook_launcher.training import Accelerator as Accelerator
    from notebook_launcher.training import AccumulationReport as AccumulationReport
    from notebook_launcher.training import AutocastKwargs as AutocastKwargs
    from notebook_launcher.training import CheckpointError as CheckpointError
    from notebook_launcher.training import DataLoaderConfiguration as DataLoaderConfiguration
    from notebook_launcher.training import DeepSpeedPlugin as DeepSpeedPlugin
    from notebook_launcher.training import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from notebook_launcher.training import DistributedType as DistributedType
    from notebook_launcher.training import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from notebook_launcher.training import GeneralTracker as GeneralTracker
    from notebook_launcher.training import GradientAccumulationPlugin as GradientAccumulationPlugin
    from notebook_launcher.training import GradScalerKwargs as GradScalerKwargs
    from notebook_launcher.training import InitProcessGroupKwargs as InitProcessGroupKwargs
    from notebook_launcher.training import ParallelismConfig as ParallelismConfig
    from notebook_launcher.training import ProcessState as ProcessState
    from notebook_launcher.training import ProfileKwargs as ProfileKwargs
    from notebook_launcher.training import ProjectConfiguration as ProjectConfiguration
    from notebook_launcher.training import broadcast as broadcast
    from notebook_launcher.training import broadcast_object_list as broadcast_object_list
    from notebook_launcher.training import clear_device_cache as clear_device_cache
    from notebook_launcher.training import find_executable_batch_size as find_executable_batch_size
    from notebook_launcher.training import gather as gather
    from notebook_launcher.training import gather_object as gather_object
    from notebook_launcher.training import get_logger as get_logger
    from notebook_launcher.training import histogram as histogram
    from notebook_launcher.training import load_model as load_model
    from notebook_launcher.training import pad_across_processes as pad_across_processes
    from notebook_launcher.training import prepare_data_loader as prepare_data_loader
    from notebook_launcher.training import reduce as reduce
    from notebook_launcher.training import release_memory as release_memory
    from notebook_launcher.training import save_model as save_model
    from notebook_launcher.training import send_to_device as send_to_device
    from notebook_launcher.training import set_seed as set_seed
    from notebook_launcher.training import skip_first_batches as skip_first_batches
    from notebook_launcher.training import synchronize_rng_states as synchronize_rng_states
    from notebook_launcher.verification import VerificationReport as VerificationReport
    from notebook_launcher.verification import verify_accumulation as verify_accumulation
    from notebook_launcher.widgets.monitor.monitor import Monitor as Monitor
    from notebook_launcher.widgets.panel.panel import ConfigPanel as ConfigPanel
    from notebook_launcher.widgets.runs.comparison import compare as compare

    # Accelerate has this name too; here it shares nothing but the process group.
    PartialState = ProcessState

_NAMES = LazyNames(__name__)

# `import *` brings what a kernel needs. What belongs to training is imported by its name: it imports torch.
__all__ = sorted(  # noqa: PLE0605
    (name for name, home in _NAMES.homes.items() if home.module != f"{__name__}.training"),
    key=lambda name: (not name.isupper(), name),
)

__version__ = "0.3.0"

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


def __getattr__(name: str) -> Any:
    if name == "notebook_launcher":
        # Not an AttributeError, after which `from ... import` would look for a submodule.
        raise ImportError(_ELSEWHERE)
    if name in _NAMES.homes:
        return _NAMES.find(name)
    # The rest of Accelerate's names is here, too, so that changing its import line is enough.
    package = importlib.import_module(f"{__name__}.training")
    if name in package.__all__:
        return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Register `%%ranks`, `%ranks`, `%%everywhere` and `%everywhere`, for `%load_ext notebook_launcher`."""
    from notebook_launcher.kernel.calls import everywhere
    from notebook_launcher.kernel.cells import magics
    from notebook_launcher.kernel.session import Session

    magics.register(shell, Session)
    everywhere.register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics, and end the ranks that `%ranks` started."""
    from notebook_launcher.kernel.calls import everywhere
    from notebook_launcher.kernel.cells import magics

    magics.unregister(shell)
    everywhere.unregister(shell)


def __dir__() -> list[str]:
    return sorted({*_NAMES.homes, "__version__"})
