"""Values of several ranks combined into one: their mean, their concatenation, a table."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_launcher.tracebacks import for_caller

__all__ = ["concatenated", "mean", "table"]

INSTALL = "Results.to_pandas() needs pandas. Type %pip install pandas."


def mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, tensors or arrays, also inside equal dicts, lists and tuples."""
    return _combined(values, "result", _mean_of_leaves)


def concatenated(values: Sequence[Any]) -> Any:
    """Return tensors, arrays, tables, lists or tuples one after another; numbers as a list; dicts by key."""
    first = values[0]
    if isinstance(first, Mapping):
        return _combined(values, "result", lambda leaves, _: concatenated(leaves), into_sequences=False)
    return _joined(values)


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
    values: Sequence[Any],
    path: str,
    combine: Callable[[Sequence[Any], str], Any],
    *,
    into_sequences: bool = True,
) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        if any(not isinstance(value, Mapping) or value.keys() != first.keys() for value in values):
            msg = f"{path} has different keys on the ranks: {[sorted(map(str, value)) for value in values]}"
            raise for_caller(ValueError(msg))
        return {
            key: _combined([value[key] for value in values], f"{path}[{key!r}]", combine, into_sequences=into_sequences)
            for key in first
        }
    if into_sequences and isinstance(first, (list, tuple)):
        if any(type(value) is not type(first) or len(value) != len(first) for value in values):
            msg = f"{path} has different lengths on the ranks: {[len(value) for value in values]}"
            raise for_caller(ValueError(msg))
        items = [_combined([value[at] for value in values], f"{path}[{at}]", combine) for at in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return combine(values, path)


def _mean_of_leaves(values: Sequence[Any], path: str) -> Any:
    try:
        total = values[0] * 1.0  # Integers and booleans become floating point, in tensors too.
        for value in values[1:]:
            total = total + value
        return total / len(values)
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        msg = f"{path} has no mean: the ranks returned {kinds} ({error}). Return numbers, tensors or dicts of them."
        raise for_caller(TypeError(msg)) from error


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    module = type(first).__module__.partition(".")[0]
    if module == "torch" and hasattr(first, "ndim"):
        torch: Any = sys.modules["torch"]
        return torch.cat(list(values)) if first.ndim else torch.stack(list(values))
    if module == "numpy":
        np: Any = sys.modules["numpy"]
        return np.concatenate(values) if getattr(first, "ndim", 0) else np.array(values)
    if module == "pandas":
        return sys.modules["pandas"].concat(values)
    if isinstance(first, (list, tuple)) and all(type(value) is type(first) for value in values):
        return type(first)(item for value in values for item in value)
    if any(isinstance(value, (list, tuple)) for value in values):
        msg = f"the ranks returned {[type(value).__name__ for value in values]}, which cannot be joined"
        raise for_caller(TypeError(msg))
    return list(values)
