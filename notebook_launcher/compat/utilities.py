"""Small functions of Accelerate's utilities, which training itself has no use for."""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.compat.state import AcceleratorState, PartialState
from notebook_launcher.config import LaunchConfig
from notebook_launcher.training import operations
from notebook_launcher.training.process import environment
from notebook_launcher.training.recording.trackers import TRACKER_CLASSES, filter_trackers
from notebook_launcher.wording import read_bool

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from notebook_launcher.settings.option_checks import Precision

CONSTANTS: dict[str, Any] = {
    "MODEL_NAME": "pytorch_model",
    "OPTIMIZER_NAME": "optimizer",
    "PROFILE_PATTERN_NAME": "profile_{suffix}.json",
    "RNG_STATE_NAME": "random_states",
    "SAFE_MODEL_NAME": "model",
    "SAFE_WEIGHTS_INDEX_NAME": "model.safetensors.index.json",
    "SAFE_WEIGHTS_NAME": "model.safetensors",
    "SAFE_WEIGHTS_PATTERN_NAME": "model{suffix}.safetensors",
    "SAMPLER_NAME": "sampler",
    "SCALER_NAME": "scaler.pt",
    "SCHEDULER_NAME": "scheduler",
    "STR_OPERATION_TO_FUNC": {
        ">": operator.gt,
        ">=": operator.ge,
        "==": operator.eq,
        "!=": operator.ne,
        "<=": operator.le,
        "<": operator.lt,
    },
    "WEIGHTS_INDEX_NAME": "pytorch_model.bin.index.json",
    "WEIGHTS_NAME": "pytorch_model.bin",
    "WEIGHTS_PATTERN_NAME": "pytorch_model{suffix}.bin",
}
"""The names of the files that a checkpoint has, and comparisons by their signs."""


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare a version, or the version of an installed package, as in `compare_versions("torch", ">=", "2.4")`."""
    from packaging.version import parse

    compare = CONSTANTS["STR_OPERATION_TO_FUNC"]
    if operation not in compare:
        raise ValueError(f"compare_versions got the operation {operation!r}. It can be {', '.join(compare)}.")
    found = library_or_version
    if isinstance(found, str):
        found = parse(importlib.metadata.version(found))
    return bool(compare[operation](found, parse(requirement_version)))


def convert_bytes(size: float) -> str:
    """Return a number of bytes with its unit, as in `"1.5 KB"`, in powers of 1024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with 16-bit tensors in its return values turned to 32 bits."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return operations.convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def get_gpu_info() -> tuple[list[str], int]:
    """Return the GPUs' names and their number."""
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)], count


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """Return the first of these variables that is set to a number from 0 on."""
    found = (int(os.environ.get(key, "-1")) for key in env_keys)
    return next((number for number in found if number >= 0), default)


def is_peft_model(model: Any) -> bool:
    """Return True if the model, without its wrappers, is one of peft's."""
    from notebook_launcher.training.unwrapping import extract_model_from_parallel

    return any(base.__module__.startswith("peft.") for base in type(extract_model_from_parallel(model)).__mro__)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return True if something listens on a port of this machine; None: 29500."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else int(port))) == 0


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge a dictionary into `destination`, recursively, and return `destination`."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method do nothing outside the main process, unless its object's `main_process_only` is False."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return call


def purge_accelerate_environment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which leaves no `ACCELERATE_...` variable behind that was not there before."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _accelerates(os.environ)
        try:
            return function(*args, **kwargs)
        finally:
            for name in _accelerates(os.environ):
                del os.environ[name]
            os.environ.update(before)

    return call


def _accelerates(variables: MutableMapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith("ACCELERATE_")}


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for yes, true, t, y, on and 1, and 0 for their opposites; with `to_bool` True and False."""
    found = read_bool(value)
    if found is None:
        raise ValueError(f"str_to_bool got {value!r}. It can be yes, true, on or 1, and no, false, off or 0.")
    return found if to_bool else int(found)


def write_basic_config(mixed_precision: Precision = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write Accelerate's settings file for this machine, and return its path; False if the file exists."""
    from notebook_launcher.settings.accelerate_yaml import default_path

    path = default_path() if save_location is None else Path(save_location)
    if path.exists():
        print(f"{path} is there already, and is kept. Remove it, or pass save_location=.")  # noqa: T201 - as Accelerate
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    return LaunchConfig(num_processes=max(1, torch.cuda.device_count()), mixed_precision=mixed_precision).to_yaml(path)


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor cannot be padded; never given here, where `pad_across_processes` refuses."""


NAMES: dict[str, Any] = {
    **CONSTANTS,
    **{helper.__name__: helper for helper in (
        CannotPadNestedTensorWarning, compare_versions, convert_bytes, convert_outputs_to_fp32, filter_trackers,
        get_gpu_info, get_int_from_env, is_peft_model, is_port_in_use, merge_dicts, on_main_process,
        purge_accelerate_environment, str_to_bool, write_basic_config,
    )},
    "ConvertOutputsToFp32": convert_outputs_to_fp32,
    "LOGGER_TYPE_TO_CLASS": TRACKER_CLASSES,
    "are_libraries_initialized": lambda *names: [name for name in names if name in sys.modules],
    "check_cuda_fp8_capability": lambda *_, **__: False,
    "check_cuda_p2p_ib_support": lambda: True,
    "check_os_kernel": lambda: None,  # It warns of hangs with kernels before Linux 5.5, which this launcher ends.
    "get_available_trackers": lambda: list(TRACKER_CLASSES),
    "get_current_device_type": lambda: ("cuda", "MULTI_GPU") if torch.cuda.is_available() else ("cpu", "MULTI_CPU"),
    "get_pretty_name": lambda obj: str(
        getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__
    ),
    "has_compiled_regions": lambda module: any(hasattr(each, "_orig_mod") for each in module.modules()),
    "id_tensor_storage": lambda tensor: (
        tensor.device, tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    ),
    "ignorant_find_batch_size": operations.find_batch_size,
    "is_compiled_module": lambda module: hasattr(module, "_orig_mod"),
    "is_initialized": lambda: bool(AcceleratorState._shared_state),  # noqa: SLF001 - ours
    "is_namedtuple": lambda data: isinstance(data, tuple) and hasattr(data, "_fields"),
    "is_tensor_information": lambda tensor_info: isinstance(tensor_info, operations.TensorInformation),
    "is_torch_tensor": lambda tensor: isinstance(tensor, torch.Tensor),
    "is_torch_version": lambda operation, version: compare_versions("torch", operation, version),
    "model_has_dtensor": lambda model: any(hasattr(parameter, "device_mesh") for parameter in model.parameters()),
    "parse_choice_from_env": lambda key, default="no": os.environ.get(key, str(default)),
    "parse_flag_from_env": lambda key, default=False: (
        environment.flag(os.environ, key) if key in os.environ else default
    ),
    "recursive_getattr": lambda obj, attr: operator.attrgetter(attr)(obj),
}  # fmt: skip
