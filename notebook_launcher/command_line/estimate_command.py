"""`estimate-memory`: parameters, gradients and optimizer states of a model, by precision and sharding."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.parser import Command, choice, whole_number_reader
from notebook_launcher.errors import ConfigError
from notebook_launcher.wording import did_you_mean

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    import torch


# --------------------------------------------------------------------------------------------------------------------
# Memory that a model takes in training, counted on the meta device: nothing is downloaded or allocated.


OPTIMIZERS = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd_momentum": 1, "sgd": 0}
"""By optimizer: the numbers that it keeps for each parameter."""
PRECISIONS = {"float32": (4, 4), "mixed (bf16, fp16)": (4, 4), "bfloat16": (2, 2)}
"""By precision: bytes of a weight and of its gradient. With mixed precision both stay in float32, and only activations
shrink (torch.autocast)."""
SHARDINGS = {"none (DDP)": (1, 1, 1), "optimizer and gradients": (1, 0, 0), "everything (FSDP)": (0, 0, 0)}
"""By sharding: 1 if each rank holds all weights, gradients, states of the optimizer; 0 if it holds its part."""


def make_model(target: str, arguments: Mapping[str, Any]) -> tuple[str, torch.nn.Module]:
    """Return a model on the meta device, with its name.

    The target is `package.module:Class` or `package.module.Class`, or a configuration of Transformers: a folder, a
    file, or its name for a kind of model. The arguments are the class's, or replace values of the configuration.
    """
    import torch

    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # A console script does not have the working directory on its path.
    try:
        with torch.device("meta"):
            place = target if ":" in target else _with_colon(target)
            return _of_class(place, arguments) if place else _of_configuration(target, arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{target} cannot be made on the meta device: {type(error).__name__}: {error}") from error


def _with_colon(target: str) -> str:
    """Return `torch.nn:Transformer` for `torch.nn.Transformer`; empty if no module has a name that begins so."""
    module, _, name = target.rpartition(".")
    if not all(part.isidentifier() for part in target.split(".")) or Path(target).exists():
        return ""
    while module:
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(module) is not None:
                return f"{module}:{name}"
        module, _, last = module.rpartition(".")
        name = f"{last}.{name}"
    return ""


def _of_class(target: str, arguments: Mapping[str, Any]) -> tuple[str, torch.nn.Module]:
    import torch

    module_name, _, name = target.partition(":")
    found: Any = None
    try:
        found = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        close = "" if found is None else did_you_mean(name.rpartition(".")[2], dir(found))
        hint = close or "Write it as package.module:Class, with a module that can be imported from here."
        raise ConfigError(f"{target}: {error}. {hint}") from error
    model = found(**arguments)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{target} made a {type(model).__name__}, which is not a torch.nn.Module.")
    return name, model


def _of_configuration(target: str, arguments: Mapping[str, Any]) -> tuple[str, torch.nn.Module]:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{target}: configurations need Transformers: pip install transformers. A class is package.module:Class."
        ) from None
    path = Path(target).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        values = json.loads(file.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(**{**values, **arguments})
        architecture = getattr(transformers, next(iter(values.get("architectures") or ()), ""), None)
        if architecture is not None:
            return architecture.__name__, architecture(config)
    elif target in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(target, **arguments)
    else:
        hint = did_you_mean(target, transformers.CONFIG_MAPPING) or (
            "Nothing is downloaded: fetch the model's config.json first."
        )
        raise ConfigError(
            f"{target} is neither a class (package.module:Class), nor a folder with a config.json, nor a model type of "
            f"Transformers. {hint}"
        )
    make: Any = transformers.AutoModel.from_config
    model: torch.nn.Module = make(config)
    return type(model).__name__, model


OPTIMIZER = f"{', '.join(OPTIMIZERS)}; adamw if omitted"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="package.module:Class (or .Class), a folder with config.json, or a model type"
    )
    parser.add_argument("--args", default="{}", metavar="JSON", help="arguments of the class: --args '{\"width\": 64}'")
    names = ("--num_processes", "-n")
    parser.add_argument(
        *names, reads=whole_number_reader(1), default=8, metavar="N", help="number of ranks; 8 if omitted"
    )
    parser.add_argument("--optimizer", reads=choice([*OPTIMIZERS]), default="adamw", metavar="NAME", help=OPTIMIZER)


def _run(options: argparse.Namespace) -> int:
    name, model = make_model(options.model, _arguments(options.args))
    print("\n".join(_lines(name, model, options.num_processes, options.optimizer)))
    return 0


def _arguments(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--args {text}: {error}. Write JSON, with names in double quotes.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--args {text}: write an object of names and values, such as '{{\"width\": 64}}'.")
    return values


def _lines(name: str, model: torch.nn.Module, num_processes: int, optimizer: str) -> list[str]:
    from notebook_launcher.drawing.tables import Column, table_text
    from notebook_launcher.wording import format_bytes, plural

    numels = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]  # A shared one: once.
    every, trained = sum(number for number, _ in numels), sum(number for number, is_trained in numels if is_trained)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    own = {of: sum(p.numel() for p in module.parameters(recurse=False)) for of, module in model.named_modules()}
    largest = max(own, key=lambda of: own[of])
    rows = [(precision, sharding) for precision in PRECISIONS for sharding in SHARDINGS]
    parts = []
    for precision, sharding in rows:
        weight, gradient = PRECISIONS[precision]
        sizes = every * weight, trained * gradient, trained * weight * OPTIMIZERS[optimizer]
        held = [
            size if is_whole else -(-size // num_processes)
            for size, is_whole in zip(sizes, SHARDINGS[sharding], strict=True)
        ]
        parts.append((held[0] + buffers, *held[1:]))
    named = zip(("weights", "gradients", optimizer), zip(*parts, strict=True), strict=True)
    columns = [
        Column("precision", [precision for precision, _ in rows]),
        Column("sharding", [sharding for _, sharding in rows]),
        *(Column(kind, [format_bytes(part) for part in bytes_], kind="number") for kind, bytes_ in named),
        Column("training, each rank", [format_bytes(sum(part)) for part in parts], kind="number"),
    ]
    counts = f"{every:,} parameters, {trained:,} of them trained"
    return [
        f"{name}: {counts}; the largest module is {largest or type(model).__name__} with {own[largest]:,}",
        f"for each of {plural(num_processes, 'rank')}; inference takes the weights alone",
        *table_text(columns),
        "Not included: activations, which grow with the batch; and buffers, because DDP copies the gradients once and",
        "FSDP gathers one module at a time.",
    ]


COMMAND = Command(
    name="estimate-memory",
    summary="weights, gradients and optimizer states of a model, by precision and sharding; nothing is downloaded",
    description="""\
Count what a model takes in training, on the meta device: nothing is downloaded and no memory is taken.

  notebook-launcher estimate-memory my_package.model:Transformer --args '{"layers": 12}'
  notebook-launcher estimate-memory ./folder-with-config.json
  notebook-launcher estimate-memory gpt2 -n 4              the default configuration of Transformers' model type""",
    add_arguments=_add_arguments,
    run=_run,
)
