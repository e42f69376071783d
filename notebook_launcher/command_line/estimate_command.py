"""`estimate-memory`: parameters, gradients and optimizer states of a model, by precision and sharding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.command import Command
from notebook_launcher.command_line.memory_estimate import OPTIMIZERS, PRECISIONS, SHARDINGS
from notebook_launcher.command_line.parser import choice, whole_number_reader
from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from notebook_launcher.command_line.memory_estimate import ModelSize

__all__ = ["COMMAND"]

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
    from notebook_launcher.command_line.memory_estimate import make_model, size_of_model

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
    from notebook_launcher.command_line.memory_estimate import bytes_of
    from notebook_launcher.drawing.tables import Column, table_text
    from notebook_launcher.wording.counts import plural
    from notebook_launcher.wording.units import format_bytes

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
