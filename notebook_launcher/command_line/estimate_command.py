"""`estimate-memory`: parameters, gradients and optimizer states of a model, by precision and sharding."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.parser import Command, choice, whole_number_reader
from notebook_launcher.errors import ConfigError
from notebook_launcher.wording import did_you_mean, type_of

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers in a model."""

    name: str
    parameters: int
    trainable: int
    buffer_bytes: int
    largest: tuple[str, int]
    """The module with the most parameters of its own, and their number."""


def bytes_of(
    size: ModelSize, precision: str, sharding: str, *, num_processes: int, optimizer: str
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and the optimizer's states on one rank."""
    weight, gradient = PRECISIONS[precision]
    whole = SHARDINGS[sharding]
    every = size.parameters * weight, size.trainable * gradient, size.trainable * weight * OPTIMIZERS[optimizer]
    parts = [bytes_ if is_whole else -(-bytes_ // num_processes) for bytes_, is_whole in zip(every, whole, strict=True)]
    return parts[0] + size.buffer_bytes, parts[1], parts[2]


def size_of_model(name: str, model: torch.nn.Module) -> ModelSize:
    """Count a model's numbers; parameters that several modules share count once."""
    parameters = list(model.parameters())
    own = {
        module_name: sum(p.numel() for p in module.parameters(recurse=False))
        for module_name, module in model.named_modules()
    }
    largest = max(own, key=lambda module_name: own[module_name])
    return ModelSize(
        name=name,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        largest=(largest or type(model).__name__, own[largest]),
    )


def make_model(target: str, arguments: Mapping[str, Any]) -> tuple[str, torch.nn.Module]:
    """Return a model on the meta device, with its name.

    Args:
        target: `package.module:Class` or `package.module.Class`, a folder or file with a configuration of Transformers,
            or its name for a kind of model.
        arguments: Arguments of the class, or values that replace the configuration's.

    Raises:
        ConfigError: There is no such model, or it cannot be made of these arguments.
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
    _check_call(target, found, arguments)
    model = found(**arguments)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{target} made a {type(model).__name__}, which is not a torch.nn.Module.")
    return name, model


def _check_call(target: str, found: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if what was named cannot be called with these arguments."""
    if isinstance(found, types.ModuleType):
        raise ConfigError(f"{target} is a module. Name a class in it: {found.__name__}:Class.")
    if not callable(found):
        raise ConfigError(f"{target} is {type_of(found)}, which makes no model. Name a class.")
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # Classes in C may have none.
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    known = [parameter.name for parameter in by_name]
    unknown = [] if takes_any else [name for name in arguments if name not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known) or f"It takes {', '.join(known) or 'none'}."
        raise ConfigError(f"{target} takes no argument {unknown[0]}. {hint}")
    missing = [
        parameter.name
        for parameter in by_name
        if parameter.default is parameter.empty and parameter.name not in arguments
    ]
    if missing:
        pattern = ", ".join(f'"{name}": ...' for name in missing)
        raise ConfigError(f"{target} needs {' and '.join(missing)}. Pass them: --args '{{{pattern}}}'.")


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
        values = _read_configuration(file)
        if values["model_type"] not in transformers.CONFIG_MAPPING:
            kind = values["model_type"]
            hint = did_you_mean(str(kind), transformers.CONFIG_MAPPING) or "A newer Transformers may have it."
            raise ConfigError(f"{file}: Transformers has no model type {kind!r}. {hint}")
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


def _read_configuration(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}.") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"{file} has no model_type, so it is not a configuration of Transformers.")
    return values


OPTIMIZER = f"{', '.join(OPTIMIZERS)}; adamw if omitted"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="package.module:Class (or .Class), a folder with config.json, or a model type"
    )
    parser.add_argument("--args", default="{}", metavar="JSON", help="arguments of the class: --args '{\"width\": 64}'")
    names = ("--num_processes", "--num-processes", "-n")
    parser.add_argument(
        *names, reads=whole_number_reader(1), default=8, metavar="N", help="number of ranks; 8 if omitted"
    )
    parser.add_argument("--optimizer", reads=choice([*OPTIMIZERS]), default="adamw", metavar="NAME", help=OPTIMIZER)


def _run(options: argparse.Namespace) -> int:

    size = size_of_model(*make_model(options.model, _arguments(options.args)))
    print("\n".join(_lines(size, options.num_processes, options.optimizer)))
    return 0


def _arguments(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--args {text}: {error}. Write JSON, with names in double quotes.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--args {text}: write an object of names and values, such as '{{\"width\": 64}}'.")
    return values


def _lines(size: ModelSize, num_processes: int, optimizer: str) -> list[str]:
    from notebook_launcher.drawing.tables import Column, table_text
    from notebook_launcher.wording import format_bytes, plural

    rows = [(precision, sharding) for precision in PRECISIONS for sharding in SHARDINGS]
    parts = [
        bytes_of(size, precision, sharding, num_processes=num_processes, optimizer=optimizer)
        for precision, sharding in rows
    ]
    named, (largest, number) = (
        zip(("weights", "gradients", optimizer), zip(*parts, strict=True), strict=True),
        size.largest,
    )
    columns = [
        Column("precision", [precision for precision, _ in rows]),
        Column("sharding", [sharding for _, sharding in rows]),
        *(Column(name, [format_bytes(part) for part in bytes_], kind="number") for name, bytes_ in named),
        Column("training, each rank", [format_bytes(sum(part)) for part in parts], kind="number"),
    ]
    counts = f"{size.parameters:,} parameters, {size.trainable:,} of them trained"
    return [
        f"{size.name}: {counts}; the largest module is {largest} with {number:,}",
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
