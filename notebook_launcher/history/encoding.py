"""Snapshots and metrics as JSON, and back.

JSON has no NaN and no infinity: such a number is the string "NaN", "Infinity" or "-Infinity". Fields that a later
version added are ignored, and fields that an earlier version lacks get their defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from notebook_launcher.history.schema import MetricPoint, PhaseSpan, RankUsage, RunSnapshot
from notebook_launcher.wording import one_line

MAX_SAVED_SPANS = 4096
"""Spans of all ranks together that a summary holds: 160 kB, and 5 ms of work."""

LAST_DAY = 1e11
"""Seconds from 1970 to the year 5138, beyond which no clock shows a time and `localtime` fails."""
MAX_RANKS = 65_536
"""Ranks of a run; a file that names more is damaged, and views would count up to them."""
# json.dumps makes a new encoder for each call with options, which takes three times as long as the encoding.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False)


def encode(data: Any) -> str:
    """Return plain data as JSON, whatever its numbers are; other objects become their `str`."""
    try:
        return _ENCODER.encode(data)
    except (TypeError, ValueError):
        return _ENCODER.encode(_plain(data))


def encode_point(point: MetricPoint) -> str:
    """Return a point as one line of JSON, without the newline."""
    return encode(_fields(point))


def decode_point(line: str | bytes) -> MetricPoint | None:
    """Return the point in a line; None if the line holds no point."""
    try:
        data = json.loads(line)
        values = {str(name): number_of(value) for name, value in data["values"].items()}
        rank, step, time = int(data["rank"]), int(data["step"]), float(data["time"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return MetricPoint(rank=rank, step=step, time=time, values=values) if is_place(rank, step) else None


def is_place(rank: int, step: int) -> bool:
    """Return True for a rank and a step that a run can have; a damaged file may have others, which no view can draw."""
    return 0 <= rank < MAX_RANKS and abs(step) < LARGEST


def encode_snapshot(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return a snapshot as plain data, with as many of the newest spans as there is room for."""
    num_spans = MAX_SAVED_SPANS // max(1, len(snapshot.phases))
    return {
        **_fields(snapshot),
        "ranks": [_fields(rank) for rank in snapshot.ranks],
        "failures": [_fields(failure) for failure in snapshot.failures],
        "changes": [_fields(change) for change in snapshot.changes],
        "settings": [_fields(setting) for setting in snapshot.settings],
        "phases": {
            str(rank): {**_fields(phases), "spans": [_encode_span(span) for span in phases.spans[-num_spans:]]}
            for rank, phases in snapshot.phases.items()
        },
        "usage": {str(rank): _encode_usage(usage) for rank, usage in snapshot.usage.items()},
    }


def decode_snapshot(data: Mapping[str, Any]) -> RunSnapshot:
    """Return the snapshot that plain data describes; raises `ValueError` if `data` is not a snapshot."""
    snapshot = decode_record(RunSnapshot, data)
    snapshot = dataclasses.replace(snapshot, usage={rank: _filled(usage) for rank, usage in snapshot.usage.items()})
    if not 0 <= snapshot.num_processes <= MAX_RANKS:
        raise ValueError(f"num_processes: {snapshot.num_processes}")
    if not 0 <= snapshot.started < LAST_DAY:
        raise ValueError(f"started: {snapshot.started}")
    if not abs(snapshot.seconds) < LAST_DAY:
        raise ValueError(f"seconds: {snapshot.seconds}")
    return snapshot


def _encode_span(span: PhaseSpan) -> tuple[str, float, float]:
    return span.phase, round(span.start, 6), round(span.seconds, 6)


def _encode_usage(usage: RankUsage) -> dict[str, list[Any]]:
    columns = {name: column for name, column in _fields(usage).items() if any(value is not None for value in column)}
    return {name: [None if value is None else round(value, 3) for value in column] for name, column in columns.items()}


def _filled(usage: RankUsage) -> RankUsage:
    """Return usage with all columns: one without a known value is left out of a file."""
    num, columns = len(usage.times), _fields(usage)
    wrong = [name for name, column in columns.items() if column and len(column) != num]
    _checked(wrong, not wrong)
    filled: dict[str, Any] = {name: column or (None,) * num for name, column in columns.items()}
    return RankUsage(**filled)


def _fields(record: Any) -> dict[str, Any]:
    kind: Any = type(record)
    return {name: getattr(record, name) for name in _field_names(kind)}


@functools.cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _plain(data: Any) -> Any:
    match data:
        case float() if not math.isfinite(data):
            return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
        case Mapping():
            return {str(key): _plain(value) for key, value in data.items()}
        case list() | tuple():
            return [_plain(item) for item in data]
        case None | bool() | int() | float() | str():
            return data
    return str(data)


# --------------------------------------------------------------------------------------------------------------------
# Values of JSON as a dataclass with annotations has them; a file that anybody changed gives one kind of error.


LARGEST = 2**53
"""Bound of whole numbers, so that they can be drawn and divided."""
DEPTH = 16
"""Levels of lists and objects in a field of any type."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")

T = TypeVar("T")


def decode_record(kind: type[T], data: Any) -> T:
    """Return a record from its fields by name, without those that the class does not know.

    Raises:
        ValueError: A field is missing, or is not what its annotation says.
    """
    known: dict[str, Any] = {}
    if isinstance(data, list):  # The values alone, to save room.
        data = dict(zip(_field_names(kind), data, strict=False))  # type: ignore[arg-type] # a class is hashable
    given = _checked(data, isinstance(data, Mapping))
    for name, converter in _converters(kind).items():  # type: ignore[arg-type] # a class is hashable
        if name in given:
            try:
                known[name] = converter(given[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(str(error).partition("() ")[2]) from None


def number_of(value: Any) -> float:
    """Return a number, which JSON has as text if it is not finite; raises `ValueError`."""
    if value is None:
        return math.nan
    return float(_checked(value, isinstance(value, int | float) or value in NOT_FINITE))


@functools.cache
def _converters(kind: type[Any]) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(kind, localns={"Mapping": Mapping})
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(kind)}


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return the function that makes a value of an annotation, or raises `ValueError`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (some,) = (_converter(each) for each in inner if each is not types.NoneType)
        return lambda value: None if value is None else some(value)
    if origin is Mapping:
        key, item = KEYS[inner[0]], _converter(inner[1])
        return lambda value: {key(k): item(v) for k, v in _checked(value, isinstance(value, Mapping)).items()}
    if origin is tuple:
        items = [_converter(each) for each in inner if each is not ...]
        return functools.partial(_tuple, items[0]) if inner[-1] is ... else functools.partial(_pair, items)
    if origin is Literal:
        return lambda value: _checked(value, isinstance(value, str) and value in inner)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(decode_record, hint)
    return PLAIN[hint]


def _tuple(item: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    return tuple(map(item, _checked(value, isinstance(value, list | tuple))))


def _pair(items: list[Callable[[Any], Any]], value: Any) -> tuple[Any, ...]:
    values = _checked(value, isinstance(value, list | tuple) and len(value) == len(items))
    return tuple(item(each) for item, each in zip(items, values, strict=True))


def _anything(value: Any) -> Any:
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, list | Mapping)]:
        depth += 1
        _checked(value, depth <= DEPTH)
        level = [item for each in level for item in (each.values() if isinstance(each, Mapping) else each)]
    return value


def _number(value: Any) -> Any:
    return value if isinstance(value, int) and abs(value) < LARGEST else number_of(value)


def _checked(value: Any, is_right: bool) -> Any:
    if not is_right:
        shown = f"it is of {type(value).__name__}" if isinstance(value, list | Mapping) else one_line(repr(value), 40)
        raise ValueError(shown)
    return value


PLAIN: dict[Any, Callable[[Any], Any]] = {
    Any: _anything,
    bool: lambda value: _checked(value, isinstance(value, bool)),
    float: _number,
    int: lambda value: _checked(value, isinstance(value, int | float) and abs(value) < LARGEST),
    str: lambda value: _checked(value, isinstance(value, str)),
}
KEYS: dict[Any, Callable[[str], Any]] = {
    int: lambda name: int(_checked(name, name.isdecimal() and len(name) < 10)),
    str: PLAIN[str],
}
