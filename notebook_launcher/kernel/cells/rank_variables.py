"""The variables of the ranks' `__main__`, side by side: names, types, shapes, and which differ between ranks."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING, Literal

from notebook_launcher.wording.counts import plural, rank_list
from notebook_launcher.wording.text import bounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from notebook_launcher.travel.rank_function import Variable

__all__ = ["RankVariable", "RankVariables"]

COLUMNS = ("name", "type", "value", "on the ranks")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankVariable:
    """One name, as all ranks have it."""

    name: str
    type_name: str
    """The type, of the first rank that has the variable."""
    value: str
    """A tensor's shape, dtype and device, or a short form of a plain value; empty for other objects."""
    ranks: tuple[int, ...]
    """The ranks that have the variable."""
    state: Literal["same", "differs", "missing", "unknown"]
    """`"missing"`: some ranks do not have it. `"unknown"`: its contents were not compared."""


class RankVariables:
    """Table of the ranks' variables; `session.who()` returns it.

    Iterating gives a `RankVariable` for each name, `variables["x"]` gives one.
    """

    def __init__(self, by_rank: Mapping[int, Mapping[str, Variable]]) -> None:
        names = sorted({name for variables in by_rank.values() for name in variables})
        self._num_ranks = len(by_rank)
        self._rows = {name: _merged(name, by_rank) for name in names}

    def __iter__(self) -> Iterator[RankVariable]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> RankVariable:
        return self._rows[name]

    @property
    def differing(self) -> list[str]:
        """Names whose type, shape or contents differ between ranks, or that some ranks do not have."""
        return [row.name for row in self if row.state in ("differs", "missing")]

    def __repr__(self) -> str:
        if not self._rows:
            return f"No variables on {plural(self._num_ranks, 'rank')}"
        table = [COLUMNS, *(_cells(row) for row in self)]
        widths = [max(len(line[at]) for line in table) for at in range(len(COLUMNS))]
        lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)
        return bounded("\n".join(lines), "list(variables) has all")

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in self
        )
        caption = f"{plural(len(self), 'variable')} on {plural(self._num_ranks, 'rank')}"
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: RankVariable) -> tuple[str, ...]:
    words = {"missing": f"only {rank_list(row.ranks)}", "unknown": "not compared"}
    return row.name, row.type_name, row.value, words.get(row.state, row.state)


def _merged(name: str, by_rank: Mapping[int, Mapping[str, Variable]]) -> RankVariable:
    found = {rank: variables[name] for rank, variables in sorted(by_rank.items()) if name in variables}
    first = next(iter(found.values()))
    forms = {(variable.type_name, variable.fingerprint) for variable in found.values()}
    state: Literal["same", "differs", "missing", "unknown"] = (
        "missing"
        if len(found) < len(by_rank)
        else "differs"
        if len(forms) > 1
        else "unknown"
        if first.fingerprint is None
        else "same"
    )
    value = first.value if len({variable.value for variable in found.values()}) == 1 else f"{first.value}, ..."
    return RankVariable(name=name, type_name=first.type_name, value=value, ranks=tuple(found), state=state)
