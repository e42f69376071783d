"""Formats a rank's exception as text, with the source lines of cells, which only the kernel has."""

from __future__ import annotations

import linecache
import sys
import textwrap
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher.travel import cells
from notebook_launcher.wording.text import one_line as in_one_line

if TYPE_CHECKING:
    from notebook_launcher.messaging.messages import ExceptionReport, Frame

__all__ = ["error_line", "format_report", "one_line_of"]

BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def format_report(report: ExceptionReport) -> str:
    """Return the traceback in the form in which Python prints it."""
    before = ""
    if report.earlier is not None:
        before = format_report(report.earlier) + (BECAUSE if report.link == "cause" else DURING)
    head = "Traceback (most recent call last):\n" if report.frames else ""
    frames = "".join(traceback.StackSummary.from_list([_summary(frame) for frame in report.frames]).format())
    text = before + head + frames + report.syntax + _last_line(report) + "\n"
    for note in report.notes:
        text += note + "\n"
    for number, member in enumerate(report.group, 1):
        text += f"  +---------------- {number} ----------------\n" + textwrap.indent(format_report(member), "  | ")
    return text


def _last_line(report: ExceptionReport) -> str:
    return f"{report.type_name}: {report.message}" if report.message else report.type_name


def error_line(report: ExceptionReport, limit: int = 200) -> str:
    """Return an exception in one line: `ValueError: boom`."""
    return in_one_line(_last_line(report), limit)


def one_line_of(error: BaseException, limit: int = 200) -> str:
    """Return an exception of this process in one line: `ValueError: boom`."""
    return in_one_line("".join(traceback.format_exception_only(type(error), error)), limit)


def _summary(frame: Frame) -> traceback.FrameSummary:
    line = frame.line or linecache.getline(frame.filename, frame.lineno)
    extra: dict[str, Any] = {}
    if sys.version_info >= (3, 11) and not frame.line and frame.colno is not None:
        extra = {"end_lineno": frame.end_lineno, "colno": frame.colno, "end_colno": frame.end_colno}
    return traceback.FrameSummary(
        cells.shown_file(frame.filename), frame.lineno, frame.name, lookup_line=False, line=line, **extra
    )
