"""Objects that travel with a call as copies, of which a user should know: random number generators, Optuna's trials."""

from __future__ import annotations

import functools
import sys
import types
from typing import TYPE_CHECKING, Any

from notebook_launcher.travel.unpicklable import Part, parts_of_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["describe_copies", "find_generators"]

OWN_GENERATORS = {
    ("torch", "Generator"): "torch.Generator().manual_seed(torch.initial_seed() + dist.get_rank())",
    ("numpy.random", "Generator"): "numpy.random.default_rng(torch.initial_seed() + dist.get_rank())",
    ("numpy.random", "RandomState"): "numpy.random.RandomState((torch.initial_seed() + dist.get_rank()) % 2**32)",
    ("random", "Random"): "random.Random(torch.initial_seed() + dist.get_rank())",
}
"""By class: the expression for a generator of the rank's own."""
OPTUNA = {"trial": "optuna.trial", "study": "optuna.study"}
"""By what Optuna calls it: the module with its class, `Trial` or `Study`."""


def describe_copies(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, num_ranks: int) -> str:
    """Return the notices about copies that travel with a call to so many ranks; nothing if there are none."""
    lines = [_describe_generators(function, args, kwargs)] if num_ranks > 1 else []
    found = _find(function, args, kwargs, _kept_in_memory) if "optuna" in sys.modules else {}
    for name, value in found.items():
        lines.append(
            f"{name}: ranks get a copy of this {_kept_in_memory(value)}, whose study is in the kernel's memory: what "
            "they report, suggest or set by it is lost. Call it here, with what the ranks return, or keep the study in "
            "a file and call it on rank 0 alone: optuna.create_study(storage='sqlite:///study.db')"
        )
    return "\n".join(filter(None, lines))


def _kept_in_memory(value: Any) -> str:
    """Return "trial" or "study" for one of Optuna whose study no file or database keeps; empty for another object."""
    for kind, module in OPTUNA.items():
        cls = getattr(sys.modules.get(module), kind.title(), None)
        if cls is not None and isinstance(value, cls):
            study = value if kind == "study" else getattr(value, "study", None)
            return kind if type(getattr(study, "_storage", None)).__name__ == "InMemoryStorage" else ""
    return ""


def _describe_generators(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the notice about generators that travel with a call; nothing if there are none."""
    found = find_generators(function, args, kwargs)
    if not found:
        return ""
    ways = dict.fromkeys(OWN_GENERATORS[kind] for generator in found.values() if (kind := _kind(generator)) is not None)
    return (
        f"{', '.join(found)}: every rank gets an equal copy of this random number generator, so all ranks draw the "
        "same numbers. That is right for shuffling a loader. For numbers of a rank's own, such as noise or "
        f"augmentation, make it in the function: {' or '.join(ways)}"
    )


def find_generators(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generators that a call brings along, by name, including those in lists, tuples and dicts.

    Generators in other objects are left out, because the generator of a data loader must be equal on all ranks.
    """
    return _find(function, args, kwargs, lambda value: _kind(value) is not None)


def _find(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Callable[[Any], object]
) -> dict[str, Any]:
    """Return the objects that a call brings along and for which `wanted` is true, by name."""
    while isinstance(function, functools.partial):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    names = {f"args[{at}]": value for at, value in enumerate(args)} | dict(kwargs)
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        names = {**_captured(function), **names}
    return {name: value for root, held in names.items() for name, value in _inside(root, held) if wanted(value)}


def _captured(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function uses from outside, and its defaults, by name."""
    return {part.expression: part.value for part in parts_of_function(Part(function), function)}


def _inside(root: str, held: Any) -> Iterator[tuple[str, Any]]:
    yield root, held
    if type(held) in (list, tuple):
        yield from ((f"{root}[{at}]", value) for at, value in enumerate(held))
    elif type(held) is dict:
        yield from ((f"{root}[{key!r}]", value) for key, value in held.items())


def _kind(value: Any) -> tuple[str, str] | None:
    if isinstance(value, type):
        return None
    for module, name in OWN_GENERATORS:
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and isinstance(value, cls) and type(value).__name__ != "SystemRandom":
            return module, name
    return None
