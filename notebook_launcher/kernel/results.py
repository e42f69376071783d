"""The results of a launch: one value for each rank, in rank order."""

from __future__ import annotations

import dataclasses
import html
import importlib
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from notebook_launcher.errors import MissingResultError, ReturnValueError
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.wording import Listed, bounded, format_metrics, one_line, plural, rank_list, shape_of

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.kernel.failures.culprit import Failure


SHORT = 60
MAX_ROWS = 16
"""Ranks that have a row each. Of more ranks, those with equal values share a row, and further rows are counted."""
COLUMNS = ("rank", "returned", "last metrics")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """The end of one rank: its state, duration, peak memory and last metrics."""

    rank: int
    state: Literal["returned", "failed", "stopped"]
    seconds: float | None
    """Seconds from the launch to the end of the rank."""
    peak_memory: int | None
    """Peak resident memory in bytes, including shared pages."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The last value of each metric that the rank reported."""


class Results(Sequence[Any]):
    """The values that the ranks returned, read-only: `results[0]` is rank 0's.

    A rank that failed has no value, and `results[rank]` raises `MissingResultError` for it; `ReturnValueError` if the
    value could not travel to the notebook, with the exception that prevented this as its cause. `results.returned` maps
    the other ranks to their values.

    Runs make results. The arguments that are not described here are attributes of the same name.

    Args:
        values: By rank that returned: its value.
        num_processes: Number of ranks of the run, those without a value included.
        ranks: A summary of each rank.
        called_ranks: The ranks that the call was for, in order; None: all of them.
        unsent: By rank that returned and has no value: the reason in words, or the exception that its value raised
            here.
    """

    def __init__(
        self,
        values: Mapping[int, Any],
        *,
        num_processes: int,
        ranks: Sequence[RankSummary] = (),
        failures: Sequence[Failure] = (),
        seconds: float = 0.0,
        seed: int | None = None,
        restarts: int = 0,
        stopped_by: str | None = None,
        timed_out: bool = False,
        called_ranks: Sequence[int] | None = None,
        unsent: Mapping[int, str | Exception] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._values = dict(values)
        self._num_processes = num_processes
        self.ranks: tuple[RankSummary, ...] = Listed(ranks)
        """A summary of each rank."""
        self.failures: tuple[Failure, ...] = Listed(failures)
        """The failure of each rank that failed, the culprit first; empty after a success."""
        self.seconds = seconds
        """Seconds from the launch to the end of the last rank."""
        self.seed = seed
        """The seed of the launch; None: its ranks began with the random states of the kernel."""
        self.restarts = restarts
        """Number of times that all ranks were started again."""
        self.stopped_by = stopped_by
        """The last rung that a stop needed ("ask", "interrupt", "terminate", "kill"); None: no stop."""
        self.timed_out = timed_out
        """True if the run exceeded its `timeout` or `idle_timeout`."""
        self._called_ranks = tuple(range(num_processes) if called_ranks is None else called_ranks)
        self._unsent = dict(unsent or {})
        self.folder = folder
        """The run's folder with its curves, logs and settings, for `open_run(results.folder)`; None: there is none."""

    def fill(self, values: Mapping[int, Any], unsent: Mapping[int, str | Exception], folder: Path) -> None:
        """Put values in place of their stand-ins, once, when a kernel opens what a host has kept in a folder."""
        self._values, self._unsent, self.folder = dict(values), dict(unsent), folder

    @property
    def returned(self) -> dict[int, Any]:
        """The values of the ranks that returned."""
        return dict(self._values)

    @property
    def unsent(self) -> dict[int, str]:
        """By rank whose value could not travel to the notebook: the reason. The value is lost, and the run is not."""
        return {rank: str(reason) for rank, reason in self._unsent.items()}

    def rank(self, rank: int) -> Any:
        """Return the value of one rank; the same as `results[rank]`."""
        return self[rank]

    def mean(self) -> Any:
        """Return the mean of the ranks' values: of numbers, tensors or arrays, or of those in equal dicts and lists.

        Raises:
            MissingResultError, ReturnValueError: A rank that took part has no value.
            TypeError, ValueError: The values have no mean, or their structures differ.
        """
        return _combined({rank: self[rank] for rank in self._called_ranks}, "result", _mean_of_leaves)

    def concat(self) -> Any:
        """Return the ranks' tensors, arrays, tables or lists one after another, in rank order; in dicts by key.

        Numbers and tensors without dimensions become the items of a list or of one tensor.

        Raises:
            MissingResultError, ReturnValueError: A rank that took part has no value.
            TypeError: The ranks returned values of different types.
            ValueError: Dicts have different keys, or tensors have shapes that do not fit together.
        """
        values = {rank: self[rank] for rank in self._called_ranks}
        return _combined(values, "result", _joined, into_sequences=False)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each rank that returned.

        Columns are the keys of dicts or the fields of dataclasses, else one column `value`, and the last value of
        each metric. If every rank returned a table, these stand below each other, with the rank in the index.
        """
        try:
            pd: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError("Results.to_pandas() needs pandas. Type %pip install pandas.") from error
        values = dict(sorted(self._values.items()))
        if values and all(isinstance(value, (pd.DataFrame, pd.Series)) for value in values.values()):
            return pd.concat(values, names=["rank"])
        metrics = {row.rank: row.metrics for row in self.ranks}
        rows = [{**_columns(value), **metrics.get(rank, {})} for rank, value in values.items()]
        return pd.DataFrame(rows, index=pd.Index(list(values), name="rank"))

    def short(self, rank: int) -> str:
        """Return one short line for the value of a rank; empty if the rank has no value."""
        return short_form(self._values[rank]) if rank in self._values else ""

    def summary_of(self, rank: int) -> RankSummary | None:
        """Return the summary of a rank; None if there is none."""
        return next((summary for summary in self.ranks if summary.rank == rank), None)

    def __len__(self) -> int:
        return self._num_processes

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        rank = self._rank_at(index)
        if rank in self._unsent:
            reason = self._unsent[rank]
            cause = reason.__cause__ or reason if isinstance(reason, Exception) else None
            raise ReturnValueError(self._why_missing(rank)) from cause
        if rank not in self._values:
            raise MissingResultError(self._why_missing(rank))
        return self._values[rank]

    def __getstate__(self) -> dict[str, Any]:
        # Exceptions go as text: those of the user may not pickle, and none keeps its traceback.
        return {**vars(self), "_unsent": self.unsent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What 0.3.0 has kept in folders names its attributes with an underscore.
        for name, value in state.items():
            kept = name in ("_values", "_num_processes", "_called_ranks", "_unsent")
            setattr(self, name if kept else name.lstrip("_"), value)

    def _rank_at(self, index: int) -> int:
        last = len(self) - 1
        try:
            return range(len(self))[index]
        except IndexError:
            msg = f"results[{index}]: the ranks are 0 to {last}."
            raise for_caller(IndexError(msg)) from None
        except TypeError:
            msg = f"results[{index!r}]: an index is the number of a rank, 0 to {last}, or a slice."
            raise for_caller(TypeError(msg)) from None

    def _why_missing(self, rank: int) -> str:
        if rank in self._unsent:
            return f"rank {rank}: {self._unsent[rank]}"
        if rank not in self._called_ranks:
            return f"rank {rank} returned nothing: only {rank_list(self._called_ranks)} ran this"
        for failure in self.failures:
            if failure.rank == rank:
                return f"rank {rank} returned nothing: {failure.summary}"
        return f"rank {rank} returned nothing: it was stopped"

    def __repr__(self) -> str:
        if self._is_empty():
            return f"{self._headline()}: {'None' if len(self) == 1 else 'all returned None'}"
        rows = [
            f"  {ranks}: {value}" + (f"  ({metrics})" if metrics else "") for ranks, value, metrics in self._table()
        ]
        return bounded("\n".join([self._headline(), *rows]), "results[rank] and results.ranks have all")

    def _repr_html_(self) -> str | None:
        """Return a table of the values; the states of the ranks are in the picture of the run."""
        if self._is_empty():
            return None
        rows = self._table()
        num_columns = len(COLUMNS) if any(row[-1] for row in rows) else len(COLUMNS) - 1
        head = "".join(f"<th>{name}</th>" for name in COLUMNS[:num_columns])
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[:num_columns]) + "</tr>" for row in rows
        )
        return (
            f"<table><caption>{html.escape(self._headline())}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _is_empty(self) -> bool:
        """Return True if every rank returned None and reported no metrics."""
        returned_none = len(self._values) == len(self) and all(value is None for value in self._values.values())
        return returned_none and not any(row.metrics for row in self.ranks)

    def _headline(self) -> str:
        is_part = len(self._called_ranks) < len(self)
        text = f"Results of {rank_list(self._called_ranks) if is_part else plural(len(self), 'rank')}"
        if self.restarts:
            text += f", restarted {plural(self.restarts, 'time')}"
        if self.timed_out:
            text += ", timed out"
        if self.stopped_by is not None:
            text += f", stopped ({self.stopped_by})"
        return text

    def _table(self) -> list[tuple[str, str, str]]:
        """Return rows: the ranks, what they returned, and their last metrics."""
        told = {row.rank: format_metrics(row.metrics) for row in self.ranks} or dict.fromkeys(self._called_ranks, "")
        cells = [(rank, self.short(rank) or self._why_missing(rank), metrics) for rank, metrics in told.items()]
        if len(cells) <= MAX_ROWS:
            return [(str(rank), value, metrics) for rank, value, metrics in cells]
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, *texts in cells:
            groups.setdefault((texts[0], texts[1]), []).append(rank)
        table = [(rank_list(ranks).partition(" ")[2], *texts) for texts, ranks in groups.items()]
        more = sum(len(ranks) for ranks in list(groups.values())[MAX_ROWS:])
        return [*table[:MAX_ROWS], *([("...", f"{plural(more, 'more rank')}: results[rank]", "")] if more else [])]


def short_form(value: Any) -> str:
    """Return a value's repr in one short line; for a tensor, array or table its type and shape."""
    if (shape := shape_of(value)) and getattr(value, "ndim", False):
        return f"{type(value).__name__}, shape {shape}, {getattr(value, 'dtype', '')}".rstrip(", ")
    return one_line(_Short().repr(value), SHORT)


class _Short(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        if (shape := shape_of(x)) and getattr(x, "ndim", False):
            return f"{type(x).__name__}{shape}"
        return super().repr_instance(x, level)


# --------------------------------------------------------------------------------------------------------------------
# Values of several ranks combined into one: their mean, their concatenation, a table.


REMEDY = "Return values of one structure from every rank, or take the values one by one: list(results)."
LIBRARIES = ("torch", "numpy", "pandas")
"""Packages whose values with dimensions can be put one after another."""


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
    """Return the ranks' values combined, by key inside equal mappings, and by item inside equal lists and tuples."""
    first = next(iter(values.values()))
    _check_equal(values, _structure, _kind, TypeError(f"{path} has different types on the ranks"))
    if isinstance(first, Mapping):

        def names(value: Mapping[Any, Any]) -> str:
            return one_line(f"[{', '.join(sorted(map(repr, value)))}]")

        _check_equal(values, set, names, ValueError(f"{path} has different keys on the ranks"))
        keys: Any = first
    elif into_sequences and isinstance(first, (list, tuple)):
        _check_equal(
            values, len, lambda value: str(len(value)), ValueError(f"{path} has different lengths on the ranks")
        )
        keys = range(len(first))
    else:
        return combine(values, path)
    items = {
        key: _combined(
            {rank: value[key] for rank, value in values.items()},
            f"{path}[{key!r}]",
            combine,
            into_sequences=into_sequences,
        )
        for key in keys
    }
    if isinstance(first, Mapping):
        return items
    return type(first)(*items.values()) if hasattr(first, "_fields") else type(first)(items.values())


def _structure(value: Any) -> Any:
    """Return the type of structure that a value is, any mapping for the same; None: it has no items to look into."""
    if isinstance(value, Mapping):
        return Mapping
    return type(value) if isinstance(value, (list, tuple)) else None


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
    different = ValueError(f"{path} has different shapes on the ranks")
    _check_equal(values, lambda value: shape_of(value) or (), _kind, different)
    return average


def _joined(values: Mapping[int, Any], path: str) -> Any:
    def container(value: Any) -> Any:
        """Return the library of a value with dimensions, or its type of structure; None: an item by itself."""
        library = type(value).__module__.partition(".")[0]
        return library if library in LIBRARIES and getattr(value, "ndim", None) else _structure(value)

    _check_equal(values, container, _kind, TypeError(f"{path} cannot be joined: its types differ"))
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
    name = type(first).__module__.partition(".")[0]
    library: Any = sys.modules.get(name)
    if name == "torch" and hasattr(first, "ndim"):
        return library.cat(values) if first.ndim else library.stack(values)
    if name == "numpy":
        return library.concatenate(values) if getattr(first, "ndim", 0) else library.array(values)
    if name == "pandas":
        return library.concat(values)
    if isinstance(first, (list, tuple)):
        return type(first)(item for value in values for item in value)
    return list(values)
