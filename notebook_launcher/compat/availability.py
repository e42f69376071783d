"""`is_..._available`: whether a package can be imported, or a device be used."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NAMES"]

PACKAGES = {
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "aim": "aim",
    "amdsmi": "amdsmi",
    "bnb": "bitsandbytes",
    "boto3": "boto3",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "datasets": "datasets",
    "dvclive": "dvclive",
    "import_timer": "import_timer",
    "lomo": "lomo_optim",
    "matplotlib": "matplotlib",
    "mlflow": "mlflow",
    "numpy": "numpy",
    "pandas": "pandas",
    "peft": "peft",
    "pynvml": "pynvml",
    "pytest": "pytest",
    "rich": "rich",
    "sagemaker": "sagemaker",
    "schedulefree": "schedulefree",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "timm": "timm",
    "torchao": "torchao",
    "torchdata": "torchdata",
    "torchvision": "torchvision",
    "tqdm": "tqdm",
    "trackio": "trackio",
    "transformers": "transformers",
    "triton": "triton",
    "wandb": "wandb",
}
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


def _has_cuda(*_: Any, **__: Any) -> bool:
    import torch

    return torch.cuda.is_available()


def _has_bf16(*_: Any, **__: Any) -> bool:
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def _has_rocm(*_: Any, **__: Any) -> bool:
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def _has_mps(*_: Any, **__: Any) -> bool:
    import torch

    return torch.backends.mps.is_available()


def _has_distributed(*_: Any, **__: Any) -> bool:
    import torch

    return torch.distributed.is_available()


NAMES: dict[str, Callable[..., bool]] = {
    **{f"is_{name}_available": functools.partial(_find_package, package) for name, package in PACKAGES.items()},
    **{f"is_{name}_available": _is_unsupported for name in UNSUPPORTED},
    "is_bf16_available": _has_bf16,
    "is_cuda_available": _has_cuda,
    "is_fp16_available": _is_supported,
    "is_habana_gaudi1": _is_unsupported,
    "is_mps_available": _has_mps,
    "is_rocm_available": _has_rocm,
    "is_torch_distributed_available": _has_distributed,
    "is_weights_only_available": _is_supported,
}
