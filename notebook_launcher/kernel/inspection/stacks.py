"""The stacks of all ranks: reads and sums up the dumps that `faulthandler` writes.

A stuck run always raises the same question: which ranks wait in which collective, and which ranks are missing?
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import html
import itertools
import re
from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.drawing.reported import flame_svg
from notebook_launcher.drawing.run_picture import picture_html
from notebook_launcher.history.summaries import Flame, FlameFrame
from notebook_launcher.tracebacks import PACKAGE_FOLDER, is_ours
from notebook_launcher.travel import cells
from notebook_launcher.wording import bounded, format_share, plural, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


ENTRY = (str(PACKAGE_FOLDER / "processes" / "rank" / "rank.py"), "run_rank")
"""File and function of a rank's outermost frame; frames outside belong to the process that the rank was forked from."""
GENERATED = "<string>"
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)(?: \[(?P<name>.*)\])? ")
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')

GROUP_CALLS = frozenset(
    {
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
        *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single"),
        *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "destroy_process_group"),
        *("gather", "gather_object", "init_process_group", "irecv", "isend", "monitored_barrier"),
        *("new_group", "new_subgroups", "recv", "recv_object_list", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list", "split_group"),
    }
)
"""Public functions of torch.distributed in which a rank can wait for others."""
C10D = "/torch/distributed/distributed_c10d.py"
DDP = "/torch/nn/parallel/distributed.py"
DEBUGGER = "/pdb.py"
COMPILER = "/torch/_dynamo/convert_frame.py"
BACKWARD = "backward (gradient all-reduce)"
WAIT = re.compile(r"\.wait\(")
ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


@dataclasses.dataclass(frozen=True, slots=True)
class StackFrame:
    """One frame."""

    function: str
    file: str
    line: int
    """0 if unknown."""

    @property
    def source(self) -> str:
        """The line of code, as this process sees it: cells are known here, whatever the rank knew."""
        return cells.source_line(self.file, self.line)

    @property
    def place(self) -> str:
        """`Cell In[3], line 7`."""
        return f"{cells.shown_file(self.file)}, line {self.line}"

    @property
    def is_library(self) -> bool:
        """True if the frame belongs to Python or to an installed package."""
        return LIBRARIES.search(self.file) is not None

    def __str__(self) -> str:
        source = self.source
        return f"{self.function}, {self.place}" + (f": {source}" if source else "")


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadStack:
    """The frames of one thread, innermost first, without this package's frames."""

    ident: int
    name: str
    frames: tuple[StackFrame, ...]
    uses_gpu: bool = False
    """True if its rank uses a GPU."""

    @property
    def user_frames(self) -> tuple[StackFrame, ...]:
        """The frames of the user's own code, without code that libraries generate, whose lines nobody can see."""
        own, in_library = [], False
        for frame in reversed(self.frames):
            # A program of `python -c` is `<string>`, too, and no library has called it.
            in_library = frame.is_library or (in_library and frame.file == GENERATED)
            if frame.line and not in_library:
                own.append(frame)
        return tuple(reversed(own))

    @property
    def waiting_in(self) -> str | None:
        """The function of torch.distributed that the thread is inside, or the wait for its GPU; None: neither."""
        # The outermost one: the user calls all_gather_object, which calls all_gather.
        for frame in reversed(self.frames):
            if frame.file.endswith(C10D) and frame.function in GROUP_CALLS:
                return frame.function
        if not self.frames:
            return None
        implied = _implied_wait(self.frames)
        return CUDA_WAIT if implied is None and waits_for_gpu(self.frames, uses_gpu=self.uses_gpu) else implied

    @property
    def is_compiling(self) -> bool:
        """True while `torch.compile` compiles; a compiled function has no frame of the compiler."""
        return any(frame.file.endswith(COMPILER) for frame in self.frames)


@dataclasses.dataclass(frozen=True, slots=True)
class RankStack:
    """The threads of one rank, the main thread first."""

    rank: int
    threads: tuple[ThreadStack, ...]

    @property
    def main(self) -> ThreadStack | None:
        """The thread that runs the function; None if the rank did not answer."""
        return self.threads[0] if self.threads else None

    @property
    def waiting_in(self) -> str | None:
        """The collective that the rank is inside."""
        return self.main.waiting_in if self.main else None

    @property
    def is_at_debugger(self) -> bool:
        """True while the rank waits at a debugger's prompt."""
        return self.main is not None and any(frame.file.endswith(DEBUGGER) for frame in self.main.frames)

    @property
    def here(self) -> StackFrame | None:
        """The innermost frame of the user's code."""
        frames = (self.main.user_frames or self.main.frames) if self.main else ()
        return frames[0] if frames else None


class _Tense(NamedTuple):
    """Words about no rank; and verbs for one rank and for several."""

    nobody: str
    is_: tuple[str, str]
    waits: tuple[str, str]
    ended: tuple[str, str]


PRESENT = _Tense(
    "no rank is up yet",
    ("is", "are"),
    ("waits", "wait"),
    ("runs nothing: its function has ended", "run nothing: their functions have ended"),
)
PAST = _Tense("no rank was up yet", ("was", "were"), ("was", "were"), ("ran nothing", "ran nothing"))


def parse_stacks(rank: int, dump: str, *, uses_gpu: bool = False) -> RankStack:
    """Read one dump of all threads, of a rank that uses a GPU or not; text around it is skipped."""
    threads: list[tuple[int, str, list[StackFrame]]] = []
    for line in dump.splitlines():
        if header := THREAD.match(line):
            threads.append((int(header["ident"], 16), header["name"] or "", []))
        elif (frame := FRAME.match(line)) and threads:
            number = 0 if frame["line"] == "???" else int(frame["line"])
            threads[-1][2].append(StackFrame(_unescape(frame["function"]), _unescape(frame["file"]), number))
    found = []
    for ident, name, frames in reversed(
        threads
    ):  # faulthandler lists the newest first, so the main thread is the last.
        inside = itertools.takewhile(lambda frame: (frame.file, frame.function) != ENTRY, frames)
        relevant = tuple(frame for frame in inside if not is_ours(frame.file) or is_end_of_call(frame))
        found.append(ThreadStack(ident, name, relevant, uses_gpu))
    return RankStack(rank, tuple(found))


def crash_site(rank: int, dump: str) -> StackFrame | None:
    """Return the frame in which the crashed thread left Python; or of the main thread if that is not known."""
    _, header, rest = dump.partition("\nCurrent thread ")
    return parse_stacks(rank, header + rest.partition("\n\n")[0]).here or parse_stacks(rank, dump).here


class Stacks(tuple[RankStack, ...]):
    """The stacks of all ranks; printed, they begin with the ranks that wait and the ranks that are waited for."""

    __slots__ = ()

    @classmethod
    def parse(cls, dumps: Mapping[int, str], *, uses_gpu: bool = False) -> Stacks:
        """Read the dump of each rank; `uses_gpu`: all ranks use GPUs."""
        return cls(parse_stacks(rank, dump, uses_gpu=uses_gpu) for rank, dump in sorted(dumps.items()))

    @property
    def verdict(self) -> str:
        """One sentence: which ranks wait in which collective, and where the others are instead."""
        return self._sum_up(PRESENT)

    @property
    def past_verdict(self) -> str:
        """The verdict, for ranks that are stopped right after."""
        return self._sum_up(PAST)

    @property
    def in_past_tense(self) -> str:
        """The past verdict and each rank's stack."""
        return self._tell(PAST)

    def _sum_up(self, tense: _Tense) -> str:
        groups: dict[tuple[str, str], list[int]] = {}
        num_calls = len({stack.waiting_in for stack in self} - {None})
        for stack in sorted(self, key=lambda stack: stack.waiting_in is None):
            groups.setdefault(_describe(stack, tense, is_absent=num_calls == 1), []).append(stack.rank)
        told = (f"{rank_list(ranks)} {one if len(ranks) == 1 else many}" for (one, many), ranks in groups.items())
        return "; ".join(told) or tense.nobody

    def _tell(self, tense: _Tense) -> str:
        return "\n".join([self._sum_up(tense), *filter(None, (_report(stack, tense) for stack in self))])

    def __str__(self) -> str:
        return self._tell(PRESENT)

    def __repr__(self) -> str:
        return bounded(str(self), "print(run.stacks()) shows all")

    def _repr_html_(self) -> str:
        ranks = "".join(
            f"<details><summary>rank {stack.rank}</summary><pre>{html.escape(report)}</pre></details>"
            for stack in self
            if (report := _report(stack, PRESENT))
        )
        return f"<p>{html.escape(self.verdict)}</p>{ranks}"


def _describe(stack: RankStack, tense: _Tense, *, is_absent: bool) -> tuple[str, str]:
    """Return a clause about a rank's position, with its verb in the singular and in the plural."""
    here = stack.here
    if stack.main is None:
        return ("did not answer",) * 2
    if stack.is_at_debugger:
        return f"{tense.is_[0]} at the debugger", f"{tense.is_[1]} at the debugger"
    if here is None:
        return tense.ended
    if stack.waiting_in:
        place = f"in {stack.waiting_in} ({here.place})"
        return f"{tense.waits[0]} {place}", f"{tense.waits[1]} {place}"
    where = f"not in it: {here}" if is_absent else f"in {here}"
    return f"{tense.is_[0]} {where}", f"{tense.is_[1]} {where}"


def _report(stack: RankStack, tense: _Tense) -> str:
    """Return the lines at which a rank's threads are; empty if it runs nothing."""
    waiting = f" ({tense.waits[0]} in {stack.waiting_in})" if stack.waiting_in else ""
    lines = [f"rank {stack.rank}{waiting}:"]
    for number, thread in enumerate(stack.threads):
        frames = thread.user_frames or (thread.frames[:1] if number == 0 else ())
        if number and frames:
            lines.append(f"  thread {thread.name or hex(thread.ident)}:")
        for frame in reversed(frames):
            lines.append(f"  {frame.place}, in {frame.function}")
            lines += [f"    {frame.source}"] if frame.source else []
    return "\n".join(lines) if len(lines) > 1 else ""


def _implied_wait(frames: tuple[StackFrame, ...]) -> str | None:
    """Return the name of the wait of a thread that is in C++ code below these frames; None if there is none."""
    top = frames[0]
    if "/torch/autograd/" in top.file:
        return BACKWARD
    if "/torch/distributed/" in top.file or top.file.endswith(DDP):
        # The module's own forward has frames above these, so DDP itself is at work.
        calls = {frame.function for frame in frames if frame.file.endswith(DDP)}
        if calls:
            return "DistributedDataParallel(...)" if "__init__" in calls else "DistributedDataParallel.forward"
        return None
    # `work.wait()` has no frame of its own.
    return "wait() of an asynchronous call" if not top.is_library and _is_wait(top) else None


def _is_wait(frame: StackFrame) -> bool:
    """Return True if a thread that is in C code below this frame waits for an asynchronous call, by its line's text."""
    if not WAIT.search(frame.source):
        return False
    try:
        line = ast.parse(frame.source)
    except SyntaxError:  # A line of a longer statement.
        return True
    names = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in _calls_in(line, frame.function)}
    return "wait" in names and "sleep" not in names


def _calls_in(line: ast.Module, function: str) -> Iterator[ast.Call]:
    """Yield the calls in a line that the frame of this function may be at: a `lambda` has a frame of its own."""
    left: list[ast.AST] = [line]
    if function == "<lambda>":
        left = [node.body for node in ast.walk(line) if isinstance(node, ast.Lambda)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.Lambda):
            left += ast.iter_child_nodes(node)


def _unescape(text: str) -> str:
    r"""Undo what faulthandler does to characters beyond ASCII: `\xe9`, `\u20ac`, `\U0001f600`."""
    return ESCAPE.sub(lambda match: chr(int(match[match.lastindex or 0], 16)), text)


# --------------------------------------------------------------------------------------------------------------------
# Sampled stacks of all ranks, folded into a tree of calls for each.


TOP = 5
"""Lines that are named for each rank."""


class Samples(tuple[Flame, ...]):
    """The ranks' time by sampled stacks; a cell shows it as a drawing, with one column for each rank.

    Each element is the tree of calls of one rank.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, texts: Mapping[int, str]) -> Samples:
        """Fold the dumps that each rank has written, one after the other."""
        return cls(_flame(rank, text) for rank, text in sorted(texts.items()))

    def to_svg(self) -> str:
        """Return the drawing as an `<svg>`."""
        return flame_svg(self)

    def save(self, path: str | Path) -> None:
        """Write the drawing to a file, in which a pointer shows each function's whole name and line."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_svg())

    def __str__(self) -> str:
        return "\n".join(_describe_samples(flame) for flame in self)

    def __repr__(self) -> str:
        return bounded(str(self), "print() shows all")

    def _repr_html_(self) -> str:
        return picture_html(self.to_svg(), str(self))


def split_dumps(text: str) -> Iterator[str]:
    """Yield each dump of a text that holds several: no thread is twice in one dump."""
    seen: set[str] = set()
    lines: list[str] = []
    for line in text.splitlines():
        if header := THREAD.match(line):
            if header["ident"] in seen:
                yield "\n".join(lines)
                lines, seen = [], set()
            seen.add(header["ident"])
        lines.append(line)
    if seen:
        yield "\n".join(lines)


def _flame(rank: int, text: str) -> Flame:
    root, num_samples = _CallTree(), 0
    for dump in split_dumps(text):
        main = parse_stacks(rank, dump).main
        if main is not None:
            num_samples += 1
            root.add(list(_path(main)))
    return Flame(rank=rank, num_samples=num_samples, frames=root.frames())


class _Key(NamedTuple):
    name: str
    place: str
    is_wait: bool
    is_library: bool


def _path(thread: ThreadStack) -> Iterator[_Key]:
    """Yield the calls from the outermost one to the innermost, or to the collective in which the rank waits."""
    # A backward computes and reduces gradients in the same C++ code, so it does not count as a wait.
    wait = None if thread.waiting_in == BACKWARD else thread.waiting_in
    for frame in reversed(thread.frames):
        if wait is not None and frame.file.endswith(C10D) and frame.function in GROUP_CALLS:
            break
        if frame.is_library:  # By function: the lines of libraries would split the drawing into slivers.
            yield _Key(frame.function, frame.file, is_wait=False, is_library=True)
        else:
            yield _Key(f"{frame.function}, line {frame.line}", frame.place, is_wait=False, is_library=False)
    if wait is not None:
        yield _Key(wait, "", is_wait=True, is_library=False)


class _CallTree:
    def __init__(self) -> None:
        self.count = 0
        self.children: collections.defaultdict[_Key, _CallTree] = collections.defaultdict(_CallTree)

    def add(self, path: list[_Key]) -> None:
        tree = self
        for key in path:
            tree = tree.children[key]
            tree.count += 1

    def frames(self) -> tuple[FlameFrame, ...]:
        found = sorted(self.children.items(), key=lambda item: -item[1].count)
        return tuple(FlameFrame(**key._asdict(), count=tree.count, children=tree.frames()) for key, tree in found)


def _describe_samples(flame: Flame) -> str:
    """Return a rank's samples, the part of waits, and the lines of the user's code that took most of them."""
    lines: collections.Counter[str] = collections.Counter()
    for frame in flame.frames:
        _count_own(frame, lines)
    top = [f"{format_share(count / flame.num_samples)} {place}" for place, count in lines.most_common(TOP)]
    waits = f", {format_share(flame.wait_share)} of them waits for other ranks" if flame.wait_share else ""
    return "\n  ".join([f"rank {flame.rank}: {plural(flame.num_samples, 'sample')}{waits}", *top])


def _count_own(frame: FlameFrame, lines: collections.Counter[str]) -> int:
    """Count the samples of each line of the user's code, without the samples of the user's functions that it calls."""
    inner = sum(_count_own(child, lines) for child in frame.children)
    if frame.is_wait or frame.is_library:
        return inner
    lines[frame.place] += frame.count - inner
    return frame.count


# --------------------------------------------------------------------------------------------------------------------
# Waits for a GPU in a stack: with NCCL a rank waits for its peers there, and not in the collective, which returns.
#
# A collective of NCCL holds up the GPU's stream. The program continues, and stops at the next line that needs a
# result.


CUDA_WAIT = "CUDA synchronization"
SYNCHRONIZE = ("/torch/cuda/__init__.py", "/torch/cuda/streams.py")
END_OF_CALL = ("/processes/rank/user_function.py", "finish")
"""File and function in which a rank waits for work on the GPU after the user's function has returned."""
READERS = ("/torch/_tensor.py", "/torch/_tensor_str.py", "/torch/amp/grad_scaler.py", "/torch/nn/utils/clip_grad.py")
"""Files of torch that read numbers from a GPU: `print(loss)`, the scaler's overflow flags, the norm's check."""
READS = re.compile(r"\.(?:item|cpu|tolist|numpy|nonzero|to|synchronize)\(|\b(?:float|int|bool)\(")
"""Calls in a line of the user's that wait for the GPU before they return."""


def is_end_of_call(frame: StackFrame) -> bool:
    """Return True for the launcher's own wait for the GPU, after the user's function has returned."""
    file, function = END_OF_CALL
    return frame.function == function and frame.file.endswith(file)


def waits_for_gpu(frames: Sequence[StackFrame], *, uses_gpu: bool) -> bool:
    """Return True if a thread with these frames, innermost first, may wait for a GPU, which its rank uses or not."""
    top = frames[0]
    if top.file.endswith(SYNCHRONIZE):
        return top.function == "synchronize"
    if not uses_gpu:
        return False
    if is_end_of_call(top):
        return True
    if top.is_library:
        return top.file.endswith(READERS)
    return READS.search(top.source) is not None
