"""A check that the ranks of a sharded model run the same forwards: one that some ranks skip is named at once.

A forward of a sharded model gathers its parameters from all ranks, and gathers pair in order. A forward that rank 0
runs alone therefore pairs with the next one of its peers, and succeeds; all later collectives are out of step, and the
ranks hang or end in gloo's abort. Three things give it away, without a collective and without a wait:

- Its peer has another mode: an evaluation under `no_grad`, or a forward and backward outside `accumulate`, meets a
  training step. A rank writes the number of a forward at which the mode changes, and reads the peers' numbers after it.
  Who has come out of a gather knows that every peer has entered it, and so has written. Forwards that follow one of the
  same mode write nothing.
- A peer has another number of forwards or optimizer steps behind it: rank 0 repeats its first micro-batch while its
  peer, after an update, begins the second. `forward_check.py` compares the numbers, on one machine.
- A peer waits already in a call that all ranks make, such as `save_model`. Each rank marks on the board that it
  waits, so looking takes nanoseconds. A peer that comes there later prints its notice after 10 s instead.

All hold only for a forward that gathers: units that kept their parameters after the last one are left out.

With NCCL a gather has returned once it is queued. There a forward is compared after the GPU has passed it: at the next
forward at which that is so, or, where the mode has changed, which is rare, after a wait for the GPU.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from notebook_launcher.context import current
from notebook_launcher.messaging.board_layout import FORWARDS, STEPS
from notebook_launcher.training.parallelism.unit_order import NUMBERS, distance, own_context
from notebook_launcher.training.process.arrivals import describe_ahead, find_ahead
from notebook_launcher.training.rank_check.check import Bulletin
from notebook_launcher.wording import class_name, plural, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from notebook_launcher.training.queued_work import QueuedWork


TOPIC = "forwards"
ON_EVERY_RANK = (
    "A sharded model gathers its parameters from all ranks in each forward. Run it on every rank and as often on each, "
    "not inside `if accelerator.is_main_process`. To evaluate on one rank, load accelerator.get_state_dict(model), "
    "which every rank must call, into a model that is not sharded."
)
OTHER_FORWARDS = f"some ranks ran a forward that others did not. {ON_EVERY_RANK}"
OTHER_STEPS = (
    "some ranks left out an optimizer step, or ran a forward that others did not. Call optimizer.step() on every rank, "
    f"not under a condition that holds on some of them. {ON_EVERY_RANK}"
)
"""The cause and the way out, at the end of a message."""
Mode = Literal["under no_grad()", "with gradients", "with gradients inside accumulate()"]
Change = tuple[int, Mode]
"""The number of a forward at which the mode changed, and the mode since."""


def check_forwards(
    model: torch.nn.Module,
    ranks: Iterable[int],
    *,
    gathers_all: Callable[[], bool],
    is_in_block: Callable[[], bool],
    count_steps: Callable[[], int],
    record: Callable[[], QueuedWork | None] | None,
) -> None:
    """Check each forward of a sharded model from now on.

    Args:
        model: The whole model, after it was sharded.
        ranks: The ranks that share it out; replicas run at their own pace.
        gathers_all: Returns True before a forward if all parameters are shared out, so that the forward gathers.
        is_in_block: Returns True inside `accumulate`.
        count_steps: Returns the number of steps that prepared optimizers have made.
        record: Marks the end of all work that is queued by now, or returns None if that cannot be done now. None: a
            gather returns when it is done.
    """
    peers = [rank for rank in ranks if rank != dist.get_rank()]
    check = _ForwardCheck(peers, ForwardMarks(peers, count_steps), gathers_all, is_in_block, record)
    # Before the hook of `fully_shard`, which gathers.
    model.register_forward_pre_hook(check.before, prepend=True)
    model.register_forward_hook(check.after)


class _ForwardCheck:
    """Counts a model's forwards, and compares them with the peers'."""

    def __init__(
        self,
        peers: list[int],
        marks: ForwardMarks,
        gathers_all: Callable[[], bool],
        is_in_block: Callable[[], bool],
        record: Callable[[], QueuedWork | None] | None,
    ) -> None:
        self._peers = peers
        self._marks = marks
        self._gathers_all = gathers_all
        self._is_in_block = is_in_block
        self._record = record
        self._bulletin = Bulletin(dist.get_rank(), dist.get_world_size())
        self._num_forwards = 0
        """Forwards so far."""
        self._mode: Mode | None = None
        """The mode of the last forward; None before the first one."""
        self._compares = False
        """True if the mode of the forward that runs is compared with the peers' when it is over."""
        self._mark: ForwardMark | None = None
        """The mark of the forward that runs; None if it gathers not all parameters."""
        self._queued = PassedForwards()
        """Forwards that are not compared yet."""
        self._bulletin.write(self, TOPIC, [0, None])  # in the order of `prepare`, the same on all ranks

    def __reduce__(self) -> tuple[type[_Unchecked], tuple[()]]:
        return _Unchecked, ()

    def before(self, model: torch.nn.Module, _args: Any) -> None:
        self._num_forwards += 1
        gathers, self._mark = self._gathers_all(), None
        if gathers:
            self._refuse_while_peers_wait(model)
            self._mark = self._marks.begin(self._num_forwards)
        mode = self._present_mode()
        if mode != self._mode:
            self._mode = mode
            self._compares = self._bulletin.write(self, TOPIC, [self._num_forwards, mode]) and gathers

    def after(self, model: torch.nn.Module, _args: Any, _output: Any) -> None:
        if self._mark is None and not self._compares:
            return
        work = None if self._record is None else self._record()
        if self._record is not None and work is None:  # Inside a captured graph.
            self._compares = False
            return
        if self._compares and self._mode is not None:
            self._compares = False
            if work is not None:
                work.synchronize()
            mine = (self._num_forwards, self._mode)
            theirs = self._bulletin.read(self, TOPIC, self._peers)
            odd = {rank: mode for rank, (number, mode) in theirs.items() if number <= mine[0] and mode != self._mode}
            if odd:
                raise RuntimeError(_explain_mode(class_name(model), mine, odd))
        if self._mark is not None:
            self._compare(model, self._mark, work)

    def _compare(self, model: torch.nn.Module, mark: ForwardMark, work: QueuedWork | None) -> None:
        passed: Iterable[ForwardMark] = [mark]
        if work is not None:
            self._queued.add(mark, work)
            passed = self._queued.take()
        drifts = itertools.chain(map(self._marks.compare_forwards, passed), [self._marks.compare_steps()])
        if (drift := next(filter(None, drifts), None)) is not None:
            raise RuntimeError(_explain_drift(class_name(model), drift))

    def _present_mode(self) -> Mode:
        if not torch.is_grad_enabled():
            return "under no_grad()"
        return "with gradients inside accumulate()" if self._is_in_block() else "with gradients"

    def _refuse_while_peers_wait(self, model: torch.nn.Module) -> None:
        context = current()
        waiting = [] if context is None else [peer for peer in context.waiting_peers() if peer in self._peers]
        if waiting and (ahead := find_ahead(waiting)):
            raise RuntimeError(_explain_wait(class_name(model), ahead))


class _Unchecked:
    """Stands in for the check in a copy of a model, which belongs to no process group."""

    def before(self, model: torch.nn.Module, args: Any) -> None: ...

    def after(self, model: torch.nn.Module, args: Any, output: Any) -> None: ...


def _explain_mode(name: str, mine: Change, odd: Mapping[int, Mode]) -> str:
    number, mode = mine
    others = " and ".join(
        f"{other} on {rank_list([rank for rank, each in odd.items() if each == other])}"
        for other in dict.fromkeys(odd.values())
    )
    return f"Forward {number} of {name} ran {mode} on rank {dist.get_rank()} and {others}: {OTHER_FORWARDS}"


def _explain_drift(name: str, drift: Drift) -> str:
    mine = f"Forward {drift.forward.number} of {name}"
    if drift.fewer_forwards:
        others = f"{rank_list(drift.fewer_forwards)} had not begun it"
        return f"{mine} ran on rank {dist.get_rank()}, and {others}: {OTHER_FORWARDS}"
    others = " and ".join(f"{steps} on rank {rank}" for rank, steps in drift.steps.items())
    steps = plural(drift.forward.num_steps, "optimizer step")
    return f"{mine} began after {steps} on rank {dist.get_rank()} and {others}: {OTHER_STEPS}"


def _explain_wait(name: str, ahead: Mapping[int, str]) -> str:
    return (
        f"{describe_ahead(ahead)}, and rank {dist.get_rank()} begins a forward of {name}, which gathers parameters "
        "from all ranks: they would wait for each other forever. Make each of these calls on every rank, in the same "
        "order, not inside `if accelerator.is_main_process`."
    )


# --------------------------------------------------------------------------------------------------------------------
# Marks that ranks of one machine leave on the board at each forward of a sharded model, for comparison by their
# peers.
#
# A mark is two bytes in shared memory, so it costs no call of the system. A rank that has come out of a forward's
# gathers knows that its peers have entered the forwards that paired with it, and so have marked them.
#
# A program runs ahead of its GPU. It has come out of a gather when the GPU has passed it, so the numbers of forwards
# are compared then, at a later forward. The numbers of steps before a forward are the same whenever they are
# compared.


IN_WRITING = 255
"""The steps of a mark that is being written."""
MAX_AHEAD = 32
"""Forwards that a program may be ahead of its GPU. Two programs are then less than `NUMBERS` / 2 apart."""


class ForwardMark(NamedTuple):
    """A forward that gathers, of this rank."""

    place: int
    """Its number on the board, from 1 to 255."""
    number: int
    """Its number among the model's forwards, for messages."""
    num_steps: int
    """Optimizer steps of this rank before it, since its first forward of the model in this call."""


class Drift(NamedTuple):
    """Ranks whose forward paired with this rank's, and is another one."""

    forward: ForwardMark
    fewer_forwards: list[int]
    """Ranks that had begun fewer forwards."""
    steps: dict[int, int]
    """`ForwardMark.num_steps` of ranks where it differs."""


class ForwardMarks:
    """The marks of this rank and its peers; without effect outside a launch.

    Args:
        peers: Ranks that share the model out with this one.
        count_steps: Returns the number of optimizer steps so far, in this run or before.
    """

    def __init__(self, peers: Sequence[int], count_steps: Callable[[], int]) -> None:
        self._peers = peers
        self._count_steps = count_steps
        self._call_id: int | None = None
        """The call of the last forward; None before the first one."""
        self._steps_before = 0
        """Optimizer steps before the first forward in that call."""

    def begin(self, number: int) -> ForwardMark | None:
        """Mark a forward that gathers, and return the mark; None outside a launch."""
        context = own_context()
        if context is None:
            return None
        if context.call_id != self._call_id:  # The last call may have failed after a step on some ranks alone.
            self._call_id, self._steps_before = context.call_id, self._count_steps()
        board, mine = context.board, FORWARDS + context.rank
        mark = ForwardMark(board[mine] % NUMBERS + 1, number, self._count_steps() - self._steps_before)
        context.forwards[mark.place] = mark
        # In this order, so that no peer takes steps for those of another forward.
        board[STEPS + context.rank] = IN_WRITING
        board[mine] = mark.place
        board[STEPS + context.rank] = mark.num_steps % NUMBERS
        return mark

    def compare_forwards(self, mark: ForwardMark) -> Drift | None:
        """Return which peers had not begun a forward, after its gathers; None if all had."""
        context = own_context()
        if context is None:
            return None
        board = context.board
        theirs = {peer: board[FORWARDS + peer] for peer in self._peers}
        fewer = [peer for peer, place in theirs.items() if place and distance(mark.place, place) > 0]
        return Drift(mark, fewer, {}) if fewer else None

    def compare_steps(self) -> Drift | None:
        """Return how the peers' steps before their latest forwards differ from this rank's; None if they agree.

        A peer that is ahead is left out: it finds the difference itself.
        """
        context = own_context()
        if context is None:
            return None
        latest = context.board[FORWARDS + context.rank]
        drifts: dict[ForwardMark, dict[int, int]] = {}
        for peer in self._peers:
            place, steps = _whole_mark(context.board, peer)
            mark = context.forwards.get(place)
            if mark is None or distance(place, latest) > 0 or steps == mark.num_steps % NUMBERS:
                continue
            drifts.setdefault(mark, {})[peer] = mark.num_steps + distance(steps, mark.num_steps)
        return next((Drift(mark, [], steps) for mark, steps in drifts.items()), None)


def _whole_mark(board: Any, peer: int) -> tuple[int, int]:
    """Return the place and steps of a peer's mark; place 0 if it has none, or writes one just now."""
    place, steps = board[FORWARDS + peer], board[STEPS + peer]
    is_whole = steps != IN_WRITING and board[FORWARDS + peer] == place
    return (place if is_whole else 0), steps


class PassedForwards:
    """Forwards whose gathers are queued on a GPU, until the GPU has passed them."""

    def __init__(self) -> None:
        self._queued: collections.deque[tuple[ForwardMark, QueuedWork]] = collections.deque()

    def add(self, mark: ForwardMark, work: QueuedWork) -> None:
        """Add a forward, and the work that ends with its gathers."""
        self._queued.append((mark, work))

    def take(self) -> Iterator[ForwardMark]:
        """Yield the forwards that the GPU has passed since; wait for those that are too far behind."""
        while self._queued:
            mark, work = self._queued[0]
            if len(self._queued) > MAX_AHEAD:
                work.synchronize()
            elif not work.query():
                return
            self._queued.popleft()
            yield mark
