"""The text of a failure: in full where the exception is raised, else in one line."""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_launcher.errors import RemoteTraceback, RunStoppedError, RunTimeoutError
from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.kernel.failures.culprit import STOPPED
from notebook_launcher.kernel.failures.missing_registrations import describe_missing
from notebook_launcher.kernel.failures.torch_errors import advice_on
from notebook_launcher.kernel.inspection.mismatches import describe_mismatch
from notebook_launcher.tracebacks import end_at_caller
from notebook_launcher.wording.counts import rank_list
from notebook_launcher.wording.text import MAX_ERROR, bounded, name_rank
from notebook_launcher.wording.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.kernel.failures.failure import Failure
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.outcome import RunOutcome
    from notebook_launcher.messaging.messages import KeptFrames

__all__ = [
    "add_hint",
    "attach_failures",
    "brief",
    "end_line",
    "failed_after",
    "for_raised",
    "interrupted",
    "raise_in_cell",
    "show_as",
]

ALL_OF_ERROR = "print(sys.last_value) shows all"
WORTH_TELLING = 1_000_000
"""Fewest bytes of tensors in kept frames whose size the message of a failure has."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Rendering:
    """An exception's `_render_traceback_` for IPython; a class, so that the exception can be pickled."""

    lines: tuple[str, ...]

    def __call__(self) -> list[str]:
        shown = getattr(sys, "last_value", None)
        if shown is not None and getattr(shown, "_render_traceback_", None) is self:
            end_at_caller(shown)
        return list(self.lines)


def attach_failures(error: BaseException, failures: tuple[Failure, ...], results: Results) -> None:
    """Add to the exception its rank, the failures, the results, and the text that notebooks show."""
    # No rank is to blame for a time-out or a stop.
    own = failures[0] if failures and not isinstance(error, (RunTimeoutError, RunStoppedError)) else None
    for name, value in (("rank", own.rank if own else None), ("failures", failures), ("results", results)):
        # A user's exception may have an attribute of that name, or refuse attributes.
        if getattr(error, name, None) in (None, ()):
            with contextlib.suppress(Exception):
                setattr(error, name, value)
    if isinstance(error, RunStoppedError):
        show_as(error, str(error))  # Without the name of the class, which reads like a failure.
        return
    text = _story(failures, results) if own is not None else ""
    if own is not None and own.traceback and error.__cause__ is None:
        with contextlib.suppress(Exception):
            error.__cause__ = RemoteTraceback("\n" + text)
    shown = "\n\n".join(filter(None, (text, _headline(error) if _adds_something(error, text) else "")))
    show_as(error, shown, "sys.last_value.failures[0].traceback has all" if text else ALL_OF_ERROR)


def show_as(error: BaseException, text: str, whole: str = ALL_OF_ERROR) -> None:
    """Have notebooks show a text instead of an exception's traceback, unless the exception has such a text already.

    `whole` says where all of a long text is.
    """
    with contextlib.suppress(Exception):
        if "_render_traceback_" not in vars(error):
            lines = bounded(text, whole, MAX_ERROR).splitlines()
            error._render_traceback_ = _Rendering(tuple(lines))  # type: ignore[attr-defined]


def add_hint(error: BaseException, hint: str) -> None:
    """Add a line of advice below the text that notebooks show for an exception."""
    rendering = getattr(error, "_render_traceback_", None)
    if isinstance(rendering, _Rendering):
        lines = bounded("\n".join(rendering.lines), ALL_OF_ERROR, MAX_ERROR - len(hint) - 2).splitlines()
        error._render_traceback_ = _Rendering((*lines, "", hint))  # type: ignore[attr-defined]


def interrupted(name: str, outcome: RunOutcome | None) -> KeyboardInterrupt:
    """Return the exception of a cell whose run the user has stopped; it tells of a failure before the stop."""
    failed = outcome.error if outcome is not None and outcome.state == "failed" else None
    failures = outcome.results.failures if outcome is not None and failed is not None else ()
    before = f"; {failures[0].who} had failed before: {failures[0].summary}" if failures else ""
    error = KeyboardInterrupt(f"{name} was stopped{before}")
    error.__cause__ = failed
    error.results = outcome.results if outcome is not None else None  # type: ignore[attr-defined]
    error.failures = failures  # type: ignore[attr-defined]
    story: list[str] = getattr(failed, "_render_traceback_", list)()
    show_as(error, "\n".join([*story, *([""] if story else []), f"KeyboardInterrupt: {error}"]))
    return error


def raise_in_cell(error: BaseException) -> NoReturn:
    """Raise the exception of a run; the cell shows the text that `attach` has added."""
    _obey_rendering(error)
    raise error


def _obey_rendering(error: BaseException) -> None:
    """Have IPython call `_render_traceback_` of syntax errors and exception groups, which it otherwise ignores.

    The handler stays until the cell has ended. A handler of the user's is not replaced.
    """
    shell = running_shell()
    kinds = (SyntaxError, getattr(builtins, "BaseExceptionGroup", SyntaxError))
    render: Any = getattr(error, "_render_traceback_", None)
    in_cell = shell is not None and threading.current_thread() is threading.main_thread()
    if not (in_cell and isinstance(error, kinds) and render) or shell.custom_exceptions:
        return

    def show(self: Any, kind: type, value: BaseException, tb: Any, tb_offset: int | None = None) -> None:
        if value is error:
            self._showtraceback(kind, value, render())
        else:
            self.showtraceback((kind, value, tb), tb_offset=tb_offset, running_compiled_code=True)

    def restore(*_: Any) -> None:
        shell.events.unregister("post_run_cell", restore)
        shell.set_custom_exc((), None)

    shell.set_custom_exc((type(error),), show)
    shell.events.register("post_run_cell", restore)


def _headline(error: BaseException) -> str:
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a broken __str__ must not hide the exception
        return "(its str() fails)"


def _adds_something(error: BaseException, story: str) -> bool:
    """Return True if the text does not contain the exception's own message already, as a rank's traceback does."""
    return not story or _text(error).strip() not in story or type(error).__name__ not in story


def _story(failures: tuple[Failure, ...], results: Results) -> str:
    first, others = failures[0], failures[1:]
    who = name_rank(first.rank, first.node, of=len(results))
    lines = [f"{first.summary if first.left_by else f'{who} failed first{_sequel(first, others)}'}."]
    if first.kind == "arrival":
        lines.append(
            "The function was not called, because the function or an object that it uses could not be rebuilt in the "
            "rank."
        )
    lines += [f"{rank_list(ranks)}: {summary}" for summary, ranks in _of_their_own(first, others).items()]
    lines += describe_mismatch(failures)
    lines += advice_on(first.summary) or describe_missing(first.summary, first.traceback)
    if first.kept is not None:
        lines.append(_describe_kept(first.rank, first.kept))
    return "\n".join(lines) + (f"\n\n{first.traceback.rstrip()}" if first.traceback else "")


def _describe_kept(rank: int, kept: KeptFrames) -> str:
    """Return the line of a failure that names the debugger, and the memory that it costs if that is worth a word."""
    offer = f"session.debug() opens a debugger where rank {rank} failed."
    if kept.tensor_bytes < WORTH_TELLING and kept.gpu_bytes is None:
        return offer
    size = format_bytes(kept.tensor_bytes)
    gpu = "" if kept.gpu_bytes is None else f" ({format_bytes(kept.gpu_bytes)} are allocated on its GPU)"
    return f"{offer} Its frames hold {size} of tensors{gpu} until the next run or session.forget()."


def _sequel(first: Failure, others: tuple[Failure, ...]) -> str:
    """Return a clause about the ranks that failed in the same way, and those that the first failure ended."""
    same = [other.rank for other in others if (other.victim, other.summary) == (first.victim, first.summary)]
    victims = [other.rank for other in others if other.victim and not first.victim]
    words = [f"{rank_list(same)} failed in the same way"] if same else []
    words += [f"{rank_list(victims)} failed as a consequence"] if victims else []
    return "".join(f"; {part}" for part in words)


def _of_their_own(first: Failure, others: tuple[Failure, ...]) -> dict[str, list[int]]:
    """Return the failures that need a line of their own, with their ranks."""
    ranks: dict[str, list[int]] = collections.defaultdict(list)
    for other in others:
        if other.victim == first.victim and other.summary != first.summary:
            ranks[other.summary].append(other.rank)
    return ranks


def mishaps(failures: tuple[Failure, ...]) -> str:
    """Return a clause about exceptions of ranks during a stop that the user asked for, such as a failed clean-up."""
    ranks: dict[str, list[int]] = collections.defaultdict(list)
    for failure in failures:
        if failure.kind == "exception" and failure.summary != STOPPED:
            ranks[failure.summary].append(failure.rank)
    return "".join(f"; while it stopped, {rank_list(raisers)} raised {error}" for error, raisers in ranks.items())


def end_line(outcome: RunOutcome, *, is_raised: bool) -> str:
    """Return the run's last line, without its name; short about a failure if the cell raises the exception below it."""
    seconds = outcome.results.seconds
    if outcome.state == "failed":
        return brief(outcome.error, seconds, is_raised=is_raised)
    if not outcome.asked_to_stop:
        return f"done in {format_seconds(seconds)}"
    ending = mishaps(outcome.results.failures) if outcome.error is not None else "; every rank had returned"
    return f"stopped after {format_seconds(seconds)}{ending}"


def brief(error: BaseException | None, seconds: float, *, is_raised: bool = False) -> str:
    """Return the end of a failed run's last line: the time and the rank, and the failure unless the cell raises it."""
    if isinstance(error, RunTimeoutError):
        return f"timed out after {format_seconds(seconds)}"
    return failed_after(seconds, getattr(error, "failures", None) or (), is_raised=is_raised)


def failed_after(seconds: float, failures: Sequence[Failure], *, is_raised: bool = False) -> str:
    """Return the time of a failure, the rank that failed first, and its failure unless the cell raises it."""
    text = f"failed after {format_seconds(seconds)}"
    if not failures:
        return text
    return f"{text} on {failures[0].who}" + ("" if is_raised else f": {failures[0].summary}")


def for_raised(last_line: str, failures: Sequence[Failure]) -> str:
    """Return a run's last line without the failure, for a cell that raises it below."""
    return last_line.removesuffix(f": {failures[0].summary}") if failures else last_line
