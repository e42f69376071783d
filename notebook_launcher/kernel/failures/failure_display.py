"""The text of a failure: in full where the exception is raised, else in one line."""

from __future__ import annotations

import builtins
import codecs
import collections
import contextlib
import dataclasses
import re
import signal
import sys
import threading
import types
from textwrap import indent
from typing import TYPE_CHECKING, Any, NoReturn

import notebook_launcher
from notebook_launcher import errors
from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.kernel.failures.culprit import CRASHES, STOPPED, exit_argument, signal_name
from notebook_launcher.kernel.inspection.hangs import SIZES_DIFFER, SUGGESTION, describe_mismatch
from notebook_launcher.tracebacks import end_at_caller
from notebook_launcher.wording import MAX_ERROR, bounded, format_bytes, format_seconds, name_rank, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from notebook_launcher.engines.engine import NodeLost
    from notebook_launcher.kernel.failures.culprit import Failure
    from notebook_launcher.kernel.hosting import UnpacksException
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.call_state import RankOutcome
    from notebook_launcher.kernel.run.conclusion import RunOutcome


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
    own = failures[0] if failures and not isinstance(error, (errors.RunTimeoutError, errors.RunStoppedError)) else None
    for name, value in (("rank", own.rank if own else None), ("failures", results.failures), ("results", results)):
        # A user's exception may have an attribute of that name, or refuse attributes.
        if getattr(error, name, None) in (None, ()):
            with contextlib.suppress(Exception):
                setattr(error, name, value)
    if isinstance(error, errors.RunStoppedError):
        show_as(error, str(error))  # Without the name of the class, which reads like a failure.
        return
    text = _story(failures, results) if own is not None else ""
    if own is not None and own.traceback and error.__cause__ is None:
        with contextlib.suppress(Exception):
            error.__cause__ = errors.RemoteTraceback("\n" + text)
    kind = type(error).__name__
    try:
        words = str(error)
    except Exception:  # a broken __str__ must not hide the exception
        words = "(its str() fails)"
    # A rank's traceback ends with the exception's own message.
    adds_something = not text or words.strip() not in text or kind not in text
    headline = (f"{kind}: {words}" if words else kind) if adds_something else ""
    shown = "\n\n".join(filter(None, (text, headline)))
    show_as(error, shown, "sys.last_value.failures[0].traceback has all" if text else ALL_OF_ERROR)


def show_as(error: Any, text: str, whole: str = ALL_OF_ERROR) -> None:
    """Have notebooks show a text instead of an exception's traceback, unless the exception has such a text already.

    `whole` says where all of a long text is.
    """
    with contextlib.suppress(Exception):
        if "_render_traceback_" not in vars(error):
            lines = bounded(text, whole, MAX_ERROR).splitlines()
            error._render_traceback_ = _Rendering(tuple(lines))


def add_hint(error: Any, hint: str) -> None:
    """Add a line of advice below the text that notebooks show for an exception."""
    rendering = getattr(error, "_render_traceback_", None)
    if isinstance(rendering, _Rendering):
        lines = bounded("\n".join(rendering.lines), ALL_OF_ERROR, MAX_ERROR - len(hint) - 2).splitlines()
        error._render_traceback_ = _Rendering((*lines, "", hint))


def interrupted(name: str, outcome: RunOutcome | None) -> KeyboardInterrupt:
    """Return the exception of a cell whose run the user has stopped; it tells of a failure before the stop."""
    failed = outcome.error if outcome is not None and outcome.state == "failed" else None
    failures = outcome.results.failures if outcome is not None and failed is not None else ()
    before = f"; {failures[0].who} had failed before: {failures[0].summary}" if failures else ""
    error = KeyboardInterrupt(f"{name} was stopped{before}")
    error.__cause__ = failed
    vars(error).update(results=None if outcome is None else outcome.results, failures=failures)
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


def _story(failures: tuple[Failure, ...], results: Results) -> str:
    first, others = failures[0], failures[1:]
    who = name_rank(first.rank, first.node, of=len(results))
    same = [other.rank for other in others if (other.victim, other.summary) == (first.victim, first.summary)]
    victims = [other.rank for other in others if other.victim and not first.victim]
    sequel = f"; {rank_list(same)} failed in the same way" if same else ""
    sequel += f"; {rank_list(victims)} failed as a consequence" if victims else ""
    lines = [f"{first.summary if first.left_by else f'{who} failed first{sequel}'}."]
    if first.kind == "arrival":
        lines.append(
            "The function was not called, because the function or an object that it uses could not be rebuilt in the "
            "rank."
        )
    own = [other for other in others if other.victim == first.victim and other.summary != first.summary]
    lines += [f"{rank_list(ranks)}: {summary}" for summary, ranks in _by_summary(own).items()]
    lines += describe_mismatch(failures)
    lines += advice_on(first.summary)
    if not advice_on(first.summary) and (found := next(_had_here(first.summary, first.traceback), "")):
        lines.append(
            f"The notebook has {found}, and this rank has not: a cell or an import has put it there. Run it by "
            "`%%everywhere`, so that each rank runs it before the function."
        )
    if first.kept is not None:
        offer = f"session.debug() opens a debugger where rank {first.rank} failed."
        if first.kept.tensor_bytes >= WORTH_TELLING or first.kept.gpu_bytes is not None:
            gpu = first.kept.gpu_bytes
            allocated = "" if gpu is None else f" ({format_bytes(gpu)} are allocated on its GPU)"
            size = format_bytes(first.kept.tensor_bytes)
            offer += f" Its frames hold {size} of tensors{allocated} until the next run or session.forget()."
        lines.append(offer)
    return "\n".join(lines) + (f"\n\n{first.traceback.rstrip()}" if first.traceback else "")


def _by_summary(failures: Iterable[Failure]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = collections.defaultdict(list)
    for failure in failures:
        ranks[failure.summary].append(failure.rank)
    return ranks


def end_line(outcome: RunOutcome, *, is_raised: bool) -> str:
    """Return the run's last line, without its name; short about a failure if the cell raises the exception below it."""
    seconds = outcome.results.seconds
    if isinstance(outcome.error, errors.RunTimeoutError):
        return f"timed out after {format_seconds(seconds)}"
    if outcome.state == "failed":
        return failed_after(seconds, getattr(outcome.error, "failures", None) or (), is_raised=is_raised)
    if not outcome.asked_to_stop:
        return f"done in {format_seconds(seconds)}"
    text = f"stopped after {format_seconds(seconds)}"
    if outcome.error is None:
        return f"{text}; every rank had returned"
    # Exceptions of ranks during a stop that the user asked for, such as a failed clean-up.
    raised = (failure for failure in outcome.results.failures if failure.kind == "exception")
    mishaps = _by_summary(failure for failure in raised if failure.summary != STOPPED).items()
    return text + "".join(f"; while it stopped, {rank_list(ranks)} raised {error}" for error, ranks in mishaps)


def failed_after(seconds: float, failures: Sequence[Failure], *, is_raised: bool = False) -> str:
    """Return the time of a failure, the rank that failed first, and its failure unless the cell raises it."""
    text = f"failed after {format_seconds(seconds)}"
    if not failures:
        return text
    return f"{text} on {failures[0].who}" + ("" if is_raised else f": {failures[0].summary}")


def for_raised(last_line: str, failures: Sequence[Failure]) -> str:
    """Return a run's last line without the failure, for a cell that raises it below."""
    return last_line.removesuffix(f": {failures[0].summary}") if failures else last_line


# --------------------------------------------------------------------------------------------------------------------
# Errors of ranks that look as if something were missing there which the notebook has: an entry, an attribute, a
# codec. Guesses, from the text of the error: the entry or attribute is looked for in the kernel's own modules.


FRAME = re.compile(r'^  File "([^"]+)", line \d+, in .*\n(?:    (.*))?', re.MULTILINE)
OF_MODULE = re.compile(r"AttributeError: module '([\w.]+)' has no attribute '(\w+)'")
OF_CLASS = re.compile(r"AttributeError: (?:type object )?'(\w+)' (?:object )?has no attribute '(\w+)'")
ENCODING = re.compile(r"LookupError: unknown encoding: (\S+)")
LOOKED_UP = re.compile(r"(?:\w*KeyError|ValueError|LookupError): ")
QUOTED = re.compile(r"""['"`]([^'"`\n]{1,100})['"`]""")


def _had_here(summary: str, traceback: str) -> Iterator[str]:
    """Yield what this process has that the error of a rank, in one line and with its traceback, names as missing."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    if match := OF_MODULE.match(summary):
        if match[2] in getattr(sys.modules.get(match[1]), "__dict__", {}):
            yield f"{match[1]}.{match[2]}"
    elif match := OF_CLASS.match(summary):
        classes = (vars(module).get(match[1]) for module in modules if getattr(module, "__name__", "") != "__main__")
        libraries = [cls for cls in classes if isinstance(cls, type) and cls.__module__ != "__main__"]
        if any(match[2] in vars(base) for cls in libraries for base in cls.__mro__):
            yield f"{match[1]}.{match[2]}"
    elif match := ENCODING.match(summary):
        with contextlib.suppress(LookupError):
            codecs.lookup(match[1])
            yield f"the codec {match[1]!r}"
    elif LOOKED_UP.match(summary) and (frames := FRAME.findall(traceback)):
        filename, line = frames[-1]
        # The module of the file; for a cell, the modules that its line names.
        notebook, names = vars(sys.modules["__main__"]), re.findall(r"[^\W\d]\w*", line)
        named = [notebook.get(name, sys.modules.get(name)) for name in names]
        own = [module for module in modules if vars(module).get("__file__") == filename]
        for module in own or [module for module in named if isinstance(module, types.ModuleType)]:
            for path, table in _tables(module):
                yield from (f"{path}[{key!r}]" for key in QUOTED.findall(summary) if dict.__contains__(table, key))


def _tables(module: types.ModuleType) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the dictionaries of a module, and those of its objects."""
    for name, value in list(vars(module).items()):
        path = f"{module.__name__}.{name}"
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        if isinstance(value, dict):
            yield path, value
        for inner, table in list(getattr(value, "__dict__", {}).items()):
            if isinstance(table, dict):
                yield f"{path}.{inner}", table


# --------------------------------------------------------------------------------------------------------------------
# Errors of torch that do not name the remedy, each with its remedy.


_RESHAPED = (
    "Something reshaped the parameters of a sharded model, as LBFGS and Adafactor do: they cannot be used with it."
)
_AVERAGED = (
    "For a moving average write averaged = AveragedModel(model), then prepare the model, then averaged.module = "
    "accelerator.prepare(averaged.module); where it averages buffers, give it avg_fn= and not multi_avg_fn=."
)
_ADVICE = {
    "Expected to mark a variable ready only once": (
        "DistributedDataParallel synchronises once for each forward. Two backward() went through one forward: add the "
        "losses up and write one backward(loss_a + loss_b). Or activation checkpointing ran a part again: pass "
        "DistributedDataParallelKwargs(static_graph=True)."
    ),
    "Expected to have finished reduction in the prior iteration": (
        "The last backward left parameters without gradients: they were frozen after prepare(), or its loss does not "
        "depend on them. Freeze before prepare(), or pass DistributedDataParallelKwargs(find_unused_parameters=True)."
    ),
    "got mixed torch.Tensor and DTensor": (
        "The parameters of a sharded model are DTensors, which do not mix with plain tensors. For a penalty on the "
        "weights, give the optimizer weight_decay, or sum over parameter.full_tensor() on every rank. " + _AVERAGED
    ),
    "would remove or reshape sharded dimension": _RESHAPED,
    "Cannot flatten unevenly sharded tensor": _RESHAPED,
    "Attempted to flatten unevenly sharded dimension": _RESHAPED,  # torch 2.8, 2.10 and 2.11
    "Sharding propagation failed for Op(op=aten.view.default": _RESHAPED,  # torch 2.9
    "operations that require placement changes": _RESHAPED,
    "'_OpNamespace' '": (
        "The rank does not know this operator. Import the library that has it in the function, or define it in a cell "
        "by torch.library.custom_op and call it by torch.ops in the function's own code."
    ),
    "FSDP does not support deepcopy": (
        "A sharded model cannot be copied: make the copy before prepare(). " + _AVERAGED
    ),
}
"""Code to write instead, by a part of torch's text."""


_ONLY_FORWARD = (
    "Gradients are synchronised only through the call of the wrapper itself, so a method whose result is trained on "
    "has to be called in the model's forward()."
)
_WRAPPED = re.compile(r"'DistributedDataParallel' object has no attribute '(\w+)'")
"""The error of a model that the user wrapped; prepared ones reach the attributes of the model inside."""
_UNNAMED = re.compile(r"NameError: name '(\w+)' is not defined")


def advice_on(text: str) -> list[str]:
    """Return the advice on an error with this text: one line, or none."""
    if wrapped := _WRAPPED.search(text):
        reached = f"accelerator.unwrap_model(model).{wrapped[1]}"
        return [f"DistributedDataParallel wraps the model: write {reached}. {_ONLY_FORWARD}"]
    if (unnamed := _UNNAMED.match(text)) and (name := unnamed[1]) in dir(notebook_launcher):
        why = "" if name in notebook_launcher.__all__ else " (`import *` leaves out what needs torch)"
        return [f"Type `from notebook_launcher import {name}`{why}."]
    return [advice for part, advice in _ADVICE.items() if part in text][:1]


# --------------------------------------------------------------------------------------------------------------------
# The error that the cell gets for a failure: an exception in its original type, anything else as `RankFailedError`.


_LEFT = (
    "Each rank has to take part in every collective: look for one under a condition on the rank, and for ranks with "
    "fewer batches."
)


def to_exception(
    culprit: RankOutcome,
    failure: Failure,
    num_ranks: int,
    unpack: UnpacksException,
    *,
    evidence: str = "",
    is_checked: bool = False,
) -> BaseException:
    """Return the exception that the cell gets for the failure of this rank.

    `evidence`: lines at the end of a message of the launcher's own, such as stacks; an original exception has none.
    `is_checked`: the ranks' collectives are compared (`check_collectives=True`).
    """
    if failure.left_by:
        # Torch's own error speaks of a crashed peer, or of a time that has not passed.
        return errors.RankFailedError(
            _joined(f"{failure.summary}. {_LEFT}{'' if is_checked else f' {SUGGESTION}'}", evidence)
        )
    if culprit.raised is not None and culprit.raised.exit_code is None:
        fd, report = culprit.take_parcel(), culprit.raised.report
        original = unpack(fd, report) if fd is not None else None
        if original is not None:  # An exception with a length can be false.
            return original
        return cannot_travel(report.type_name, report.message, culprit.rank, evidence)
    error = errors.RankFailedError(_joined(_message(culprit, failure, num_ranks), evidence))
    error.exitcode = failure.exitcode
    return error


def cannot_travel(kind: str, message: str, rank: int, evidence: str = "") -> errors.RankFailedError:
    """Return the error that stands in for an exception which cannot be rebuilt in the kernel."""
    return errors.RankFailedError(
        _joined(f"{kind}: {message} (rank {rank}; the exception itself cannot travel)", evidence)
    )


def _joined(*parts: str) -> str:
    return "\n".join(filter(None, parts))


def _message(outcome: RankOutcome, failure: Failure, num_ranks: int) -> str:
    rank = name_rank(outcome.rank, failure.node, of=num_ranks)
    code = failure.exitcode
    if outcome.returned is not None and code is not None:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        where = failure.place or "an exit handler, a thread or a destructor"
        text = f"{rank} {how} after it had returned: in {where}. The values are in the exception's `results`."
    elif outcome.raised is not None:
        argument = exit_argument(outcome.raised, code)
        text = f"{rank} called sys.exit({argument}). Return a value, or raise an exception that describes the problem."
    elif outcome.exited is None or code is None:
        text = f"{rank} did not start. Launch again, and if that fails, with fewer ranks."
    elif code >= 0:
        text = f"{rank} exited with code {code} before it returned: something called os._exit, or C code exited."
    else:
        text = f"{rank} was killed by {signal_name(-code)}{_signal_hint(outcome, failure.place)}"
    if failure.last_lines:
        if any(SIZES_DIFFER.search(line) for line in failure.last_lines):
            text += f"\n{SUGGESTION}"
        text += "\nIts last output:\n" + "\n".join(f"    {line}" for line in failure.last_lines)
    return text


def _signal_hint(outcome: RankOutcome, place: str) -> str:
    assert outcome.exited is not None
    signum, peak = -outcome.exited.exitcode, format_bytes(outcome.exited.peak_rss)
    site = f", in {place}" if place else ""
    if signum == signal.SIGKILL and outcome.exited.oom:
        return f", out of memory: it had used {peak}. Use fewer ranks, smaller batches, or less captured data."
    if signum == signal.SIGKILL:
        return f". It had used {peak}. There is no sign that memory ran out, so another process or a user killed it."
    if signum == signal.SIGBUS:
        return f"{site}. Often /dev/shm is full: data-loader workers need it; see `df -h /dev/shm`."
    if signum in CRASHES:
        return f" in C code{site}" if place else " in C code; its stack is in its output."
    return "."


def node_lost_error(lost: NodeLost) -> errors.NodeLostError:
    """Return the error for a node that is gone."""
    reason, _, words = lost.reason.partition("\n")
    error = errors.NodeLostError(
        f"{lost.node} is gone, with {rank_list(lost.ranks)}: {reason}."
        + (f"\nIts last words:\n{indent(words, '    ')}" if words else "")
    )
    error.rank = lost.ranks[0] if lost.ranks else None
    return error
