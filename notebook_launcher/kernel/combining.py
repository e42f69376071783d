"""Values of several ranks combined into one: their mean, their concatenation, a table."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_launcher.tracebacks import for_caller
from notebook_launcher.wording.counts import rank_list
from notebook_launcher.wording.text import one_line, shape_of

__all__ = ["concatenated", "mean", "table"]

INSTALL = "Results.to_pandas() needs pandas. Type %pip install pandas."
REMEDY = "Return values of one structure from every rank, or take the values one by one: list(results)."
LIBRARIES = ("torch", "numpy", "pandas")
"""Packages whose values with dimensions can be put one after another."""


def mean(values: Mapping[int, Any]) -> Any:
    """Return the mean of the ranks' numbers, tensors or arrays, also inside equal dicts, lists and tuples."""
    return _combined(values, "result", _mean_of_leaves)


def concatenated(values: Mapping[int, Any]) -> Any:
    """Return tensors, arrays, tables, lists or tuples one after another; numbers as a list; dicts by key."""
    return _combined(values, "result", _joined, into_sequences=False)


def table(values: Mapping[int, Any], metrics: Mapping[int, Mapping[str, float]]) -> Any:
    """Return a `pandas.DataFrame` with a row for each rank, or the ranks' own tables below each other."""
    try:
        pd: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError(INSTALL) from error
    if values and all(isinstance(value, (pd.DataFrame, pd.Series)) for value in values.values()):
        return pd.concat(dict(values), names=["rank"])
    rows = [{**_columns(value), **metrics.get(rank, {})} for rank, value in values.items()]
    return pd.DataFrame(rows, index=pd.Index(list(values), name="rank"))


def _columns(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    return {} if value is None else {"value": value}


def _combined(
    values: Mapping[int, Any],
    path: str,
    combine: Callable[[Mapping[int, Any], str], Any],
    *,
    into_sequences: bool = True,
) -> Any:
    first = next(iter(values.values()))
    _check_equal(values, _structure, _kind, TypeError(f"{path} has different types on the ranks"))
    if isinstance(first, Mapping):
        _check_equal(values, set, _names_of_keys, ValueError(f"{path} has different keys on the ranks"))
        return {
            key: _combined(_items(values, key), f"{path}[{key!r}]", combine, into_sequences=into_sequences)
            for key in first
        }
    if into_sequences and isinstance(first, (list, tuple)):
        _check_equal(
            values, len, lambda value: f"{len(value)}", ValueError(f"{path} has different lengths on the ranks")
        )
        items = [_combined(_items(values, at), f"{path}[{at}]", combine) for at in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return combine(values, path)


def _items(values: Mapping[int, Any], key: Any) -> dict[int, Any]:
    return {rank: value[key] for rank, value in values.items()}


def _structure(value: Any) -> Any:
    """Return the type of structure that a value is, any mapping for the same; None: it has no items to look into."""
    if isinstance(value, Mapping):
        return Mapping
    return type(value) if isinstance(value, (list, tuple)) else None


def _container(value: Any) -> Any:
    """Return what a value is for `concat`; None: an item by itself."""
    library = type(value).__module__.partition(".")[0]
    return library if library in LIBRARIES and getattr(value, "ndim", None) else _structure(value)


def _check_equal(
    values: Mapping[int, Any], trait: Callable[[Any], Any], describe: Callable[[Any], str], error: Exception
) -> None:
    """Raise an error, with a description of each rank's value added, if the ranks' values differ in a trait."""
    traits = [trait(value) for value in values.values()]
    if any(each != traits[0] for each in traits):
        raise for_caller(type(error)(f"{error}: {_by_rank(values, describe)}. {REMEDY}"))


def _by_rank(values: Mapping[int, Any], describe: Callable[[Any], str]) -> str:
    """Return `int on ranks 0, 2; dict on rank 1`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(describe(value), []).append(rank)
    return "; ".join(f"{words} on {rank_list(those)}" for words, those in ranks.items())


def _kind(value: Any) -> str:
    shape = shape_of(value)
    return f"{type(value).__name__}{'' if shape is None else shape}"


def _names_of_keys(value: Mapping[Any, Any]) -> str:
    return one_line(f"[{', '.join(sorted(map(repr, value)))}]")


def _mean_of_leaves(values: Mapping[int, Any], path: str) -> Any:
    first, *others = values.values()
    try:
        total = first * 1.0  # Integers and booleans become floating point, in tensors too.
        for value in others:
            total = total + value
        average = total / len(values)
    except (TypeError, ValueError, RuntimeError) as error:
        given = f"{_by_rank(values, _kind)} ({one_line(error)})"
        msg = f"{path} has no mean: {given}. Return numbers, tensors or dicts of them."
        raise for_caller(TypeError(msg)) from error
    # Shapes that fit by broadcasting would give a mean that no rank's value has the shape of.
    _check_equal(values, _dimensions, _kind, ValueError(f"{path} has different shapes on the ranks"))
    return average


def _dimensions(value: Any) -> tuple[Any, ...]:
    return shape_of(value) or ()


def _joined(values: Mapping[int, Any], path: str) -> Any:
    _check_equal(values, _container, _kind, TypeError(f"{path} cannot be joined: its types differ"))
    try:
        return _end_to_end(list(values.values()))
    except (TypeError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        msg = (
            f"{path} cannot be joined: {_by_rank(values, _kind)} ({one_line(error)}). Return tensors or arrays whose "
            "shapes differ in the first dimension alone, or take the values one by one: list(results)."
        )
        raise for_caller(kind(msg)) from error


def _end_to_end(values: Sequence[Any]) -> Any:
    first = values[0]
    library = type(first).__module__.partition(".")[0]
    if library == "torch" and hasattr(first, "ndim"):
        torch: Any = sys.modules["torch"]
        return torch.cat(values) if first.ndim else torch.stack(values)
    if library == "numpy":
        np: Any = sys.modules["numpy"]
        return np.concatenate(values) if getattr(first, "ndim", 0) else np.array(values)
    if library == "pandas":
        return sys.modules["pandas"].concat(values)
    if isinstance(first, (list, tuple)):
        return type(first)(item for value in values for item in value)
    return list(values)
