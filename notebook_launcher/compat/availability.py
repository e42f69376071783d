"""`is_..._available`: whether a package can be imported, or a device be used."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = {
    **{name: name for name in (
        "aim", "amdsmi", "boto3", "clearml", "comet_ml", "datasets", "dvclive", "import_timer", "matplotlib", "mlflow",
        "numpy", "pandas", "peft", "pynvml", "pytest", "rich", "sagemaker", "schedulefree", "swanlab", "tensorboard",
        "timm", "torchao", "torchdata", "torchvision", "tqdm", "trackio", "transformers", "triton", "wandb",
    )},
    **dict.fromkeys(("4bit_bnb", "8bit_bnb", "bnb"), "bitsandbytes"),
    "lomo": "lomo_optim",
}  # fmt: skip
"""By the middle of the function's name, the package that it looks for."""

UNSUPPORTED = (
    "bitsandbytes_multi_backend", "deepspeed", "fp8", "hpu", "megatron_lm", "mlu", "msamp", "musa", "neuron", "npu",
    "pippy", "sdaa", "torch_xla", "torchdata_stateful_dataloader", "transformer_engine", "transformer_engine_mxfp8",
    "xccl", "xpu",
)  # fmt: skip
"""Packages that this package does not use, installed or not: programs take the other branch."""


def _find_package(package: str, *_: Any, **__: Any) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _is_unsupported(*_: Any, **__: Any) -> bool:
    return False


def _is_supported(*_: Any, **__: Any) -> bool:
    return True


def _torch_says(answer: Callable[[Any], bool]) -> Callable[..., bool]:
    def ask(*_: Any, **__: Any) -> bool:
        return answer(importlib.import_module("torch"))

    return ask


NAMES: dict[str, Callable[..., bool]] = {
    **{f"is_{name}_available": functools.partial(_find_package, package) for name, package in PACKAGES.items()},
    **{f"is_{name}_available": _is_unsupported for name in UNSUPPORTED},
    "is_bf16_available": _torch_says(lambda torch: not torch.cuda.is_available() or torch.cuda.is_bf16_supported()),
    "is_cuda_available": _torch_says(lambda torch: torch.cuda.is_available()),
    "is_fp16_available": _is_supported,
    "is_habana_gaudi1": _is_unsupported,
    "is_mps_available": _torch_says(lambda torch: torch.backends.mps.is_available()),
    "is_rocm_available": _torch_says(lambda torch: torch.version.hip is not None and torch.cuda.is_available()),
    "is_torch_distributed_available": _torch_says(lambda torch: torch.distributed.is_available()),
    "is_weights_only_available": _is_supported,
}
