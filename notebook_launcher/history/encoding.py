"""Snapshots and metrics as JSON, and back.

JSON has no NaN and no infinity: such a number is the string "NaN", "Infinity" or "-Infinity". Fields that a later
version added are ignored, and fields that an earlier version lacks get their defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from notebook_launcher.history.schema import (
    MetricPoint,
    PhaseSpan,
    RankFailure,
    RankPhases,
    RankSnapshot,
    RankUsage,
    RunChange,
    RunSetting,
    RunSnapshot,
)

__all__ = ["MAX_SAVED_SPANS", "decode_point", "decode_snapshot", "encode", "encode_point", "encode_snapshot"]

MAX_SAVED_SPANS = 4096
"""Spans of all ranks together that a summary holds: 160 kB, and 5 ms of work."""

T = TypeVar("T")

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
    # Takes half the time of encoding the whole point, and there may be 10,000 points a second.
    head = f'"rank":{point.rank},"step":{point.step},"time":{point.time!r}'
    return f'{{{head},"values":{encode(point.values)}}}'


def decode_point(line: str | bytes) -> MetricPoint | None:
    """Return the point in a line; None if the line holds no point."""
    try:
        data = json.loads(line)
        values = {str(name): _number(value) for name, value in data["values"].items()}
        return MetricPoint(rank=int(data["rank"]), step=int(data["step"]), time=float(data["time"]), values=values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


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
    """Return the snapshot that plain data describes.

    Raises:
        TypeError: A field is missing or has another type, so `data` is not a snapshot.
        ValueError: As TypeError.
        AttributeError: As TypeError.
    """
    return _build(
        RunSnapshot,
        data,
        ranks=tuple(_decode_rank(rank) for rank in data.get("ranks", ())),
        failures=tuple(
            _build(RankFailure, item, last_lines=tuple(item.get("last_lines", ()))) for item in data.get("failures", ())
        ),
        changes=tuple(_build(RunChange, item) for item in data.get("changes", ())),
        settings=tuple(_build(RunSetting, item) for item in data.get("settings", ())),
        phases={int(rank): _decode_phases(item) for rank, item in data.get("phases", {}).items()},
        usage={int(rank): _decode_usage(item) for rank, item in data.get("usage", {}).items()},
    )


def _encode_span(span: PhaseSpan) -> tuple[str, float, float]:
    return span.phase, round(span.start, 6), round(span.seconds, 6)


def _encode_usage(usage: RankUsage) -> dict[str, list[Any]]:
    columns = {name: column for name, column in _fields(usage).items() if any(value is not None for value in column)}
    return {name: [None if value is None else round(value, 3) for value in column] for name, column in columns.items()}


def _decode_usage(data: Mapping[str, Any]) -> RankUsage:
    times = tuple(map(float, data.get("times", ())))
    unknown = (None,) * len(times)
    columns = {name: tuple(data.get(name, unknown)) for name in _field_names(RankUsage) if name != "times"}
    return RankUsage(times=times, **columns)


def _decode_rank(data: Mapping[str, Any]) -> RankSnapshot:
    metrics = {name: _number(value) for name, value in data.get("metrics", {}).items()}
    return _build(RankSnapshot, data, metrics=metrics)


def _decode_phases(data: Mapping[str, Any]) -> RankPhases:
    spans = tuple(PhaseSpan(phase=span[0], start=span[1], seconds=span[2]) for span in data.get("spans", ()))
    micro_batches, samples = data.get("fullest", (0, 0.0))
    return _build(RankPhases, data, spans=spans, fullest=(int(micro_batches), float(samples)))


def _fields(record: Any) -> dict[str, Any]:
    kind: Any = type(record)
    return dict(zip(_field_names(kind), _reader(kind)(record), strict=True))


@functools.cache
def _reader(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads all fields of a record at once: five times as fast as one by one."""
    return operator.attrgetter(*_field_names(kind))  # type: ignore[arg-type] # a class is hashable


def _build(kind: type[T], data: Mapping[str, Any], **decoded: Any) -> T:
    known = _field_names(kind)  # type: ignore[arg-type] # a class is hashable
    return kind(**{**{name: value for name, value in data.items() if name in known}, **decoded})


@functools.cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


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
