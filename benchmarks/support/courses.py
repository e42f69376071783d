"""Runs both ranks over a link and keeps their reports, for `gradient_sync.py` and `comm_hooks.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.links import LINKS, connected
from support.measurements import say
from support.ranks import reports

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.measurements import Measurements

QUIET = 180.0
"""Longest time between two reports of rank 0, in seconds: an epoch over the slowest link takes 40."""


def run_time(
    found: Measurements, link: str, contenders: Iterable[tuple[str, str]], *, batches: int, all_variants: bool
) -> None:
    """Measure (name, hook) contenders over a link.

    Samples are kept by ("seconds" or "bytes", link, name, hook, variant), the values that a window all-reduces by
    ("numbers", …), and the rate of the link by ("rate", link). If the link failed, ("link", link) has the reason.
    """
    spec = {"job": "time", "batches": batches, "repeats": found.repeats, "all_variants": all_variants}
    for report in _reports(found, link, spec, contenders):
        kind, key = report["kind"], (link, report.get("name"), report.get("hook"), report.get("variant"))
        if kind == "link":
            found.add(report["rate"], "rate", link)
            found.add(report["gradient"], "gradient")
        elif kind == "count":
            found.add(sum(report["sizes"]), "numbers", *key)
        elif kind == "epoch":
            found.add(report["seconds"], "seconds", *key)
            found.add(report["bytes"], "bytes", *key)
        else:
            found.reasons[("failed", *key)] = report["reason"]


def run_loss(found: Measurements, contenders: Iterable[tuple[str, str]], *, batches: int, epochs: int) -> None:
    """Train (name, hook) contenders on one node; keep their final losses by ("loss", name, hook)."""
    spec = {"job": "loss", "batches": batches, "epochs": epochs}
    for report in _reports(found, "node", spec, contenders):
        if report["kind"] == "loss":
            found.add(report["loss"], "loss", report["name"], report["hook"])
        else:
            found.reasons["loss", report["name"], report["hook"]] = report["reason"]


def _reports(
    found: Measurements, link: str, spec: dict[str, Any], contenders: Iterable[tuple[str, str]]
) -> Iterable[dict[str, Any]]:
    say(LINKS[link].label)
    with found.guarded("link", link), connected(LINKS[link]) as network:
        whole = {**spec, "interface": network.interface, "contenders": list(contenders)}
        yield from reports(network, "sync_rank.py", whole, limit=QUIET)


def cell(found: Measurements, what: str, key: tuple[str, ...], form: Any) -> str:
    """Return a figure of (link, name, hook, variant), or the reason for its absence."""
    link, name, hook, _ = key
    for reason in (("failed", *key), ("failed", link, name, hook, None)):
        if reason in found.reasons:
            return f"failed: {found.reasons[reason][:160]}"
    return found.cell(what, *key, form=form)


def problem(found: Measurements, link: str) -> str:
    """Return a line with the error of a whole link, or an empty text."""
    reason = found.reasons.get(("link", link))
    return f"Some measurements are missing: {reason}\n\n" if reason else ""
