"""`Finding`: one fact about this machine or process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import textwrap
from typing import TYPE_CHECKING, Literal

from notebook_launcher.drawing.tables import Column, joined, table_html
from notebook_launcher.wording import MAX_SHOWN, bounded, escape, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


Verdict = Literal["fact", "good", "warning", "problem"]
"""`"fact"`: nothing follows from it. `"good"`: tried, and it works. `"warning"`: it will cost time or limit a launch.
`"problem"`: launches fail or lose output until it is changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One fact, the verdict on it, and what to type."""

    area: str
    """Heading under which the fact stands, such as `"limits"`."""
    name: str
    fact: str
    """Measurement in words, with units."""
    verdict: Verdict = "fact"
    advice: str = ""
    """Code or command to type; empty if there is nothing to do. Every warning and every problem has it."""


def warning(area: str, name: str, fact: str, advice: str) -> Finding:
    """Return a warning with what to type; without advice, a fact."""
    return Finding(area, name, fact, "warning" if advice else "fact", advice)


# --------------------------------------------------------------------------------------------------------------------
# `Diagnosis`: all findings, as a table in a notebook, as text elsewhere, and as JSON for a report.


SIGNS = {"fact": " ", "good": "✓", "warning": "!", "problem": "✗"}
WIDTH = 118
NAME_WIDTH = 34


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings of `doctor()`; true if there is no problem."""

    findings: tuple[Finding, ...]
    """All facts, in the order of the table."""

    @property
    def ok(self) -> bool:
        """True if there is no problem; warnings do not count."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that make launches fail or lose output."""
        return tuple(finding for finding in self.findings if finding.verdict == "problem")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that cost time or limit a launch."""
        return tuple(finding for finding in self.findings if finding.verdict == "warning")

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self._text(self.findings)

    def __repr__(self) -> str:
        if len(text := str(self)) <= MAX_SHOWN:
            return text
        notable = self.problems + self.warnings
        left = plural(len(self.findings) - len(notable), "other finding")
        return bounded(f"{self._text(notable)}\n{left}: print(doctor()) shows all", "print(doctor()) shows all")

    def _text(self, chosen: Sequence[Finding]) -> str:
        lines = []
        for area, findings in self._by_area():
            if shown := [finding for finding in findings if finding in chosen]:
                lines += [area] + [line for finding in shown for line in _lines(finding)]
        return "\n".join([*lines, self._conclusion()])

    def _repr_html_(self) -> str:
        tables = [
            table_html(
                [
                    Column("", [SIGNS[finding.verdict].strip() for finding in findings]),
                    Column("what", [finding.name for finding in findings]),
                    Column("fact", [finding.fact for finding in findings]),
                    Column("what to type", [finding.advice for finding in findings]),
                ],
                caption=area,
            )
            for area, findings in self._by_area()
        ]
        return joined([*tables, f"<p>{escape(self._conclusion())}</p>"])

    def to_json(self) -> str:
        """Return the findings as JSON."""
        rows = [dataclasses.asdict(finding) for finding in self.findings]
        return json.dumps({"ok": self.ok, "findings": rows}, indent=2)

    def _by_area(self) -> Iterator[tuple[str, list[Finding]]]:
        for area, findings in itertools.groupby(self.findings, key=operator.attrgetter("area")):
            yield area, list(findings)

    def _conclusion(self) -> str:
        counts = [(len(self.problems), "problem"), (len(self.warnings), "warning")]
        return (
            ", ".join(plural(count, word) for count, word in counts if count) or "nothing stands in the way of a launch"
        )


def _lines(finding: Finding) -> list[str]:
    head = f"  {SIGNS[finding.verdict]} {finding.name:<{NAME_WIDTH}} "
    lines = textwrap.wrap(finding.fact or "-", WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    if finding.advice:
        lines += textwrap.wrap(f"-> {finding.advice}", WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 9)
    return lines
