"""Ranks that stay alive between calls."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.calls import checks
from notebook_launcher.kernel.calls.call_scope import EVERYWHERE, CallScope
from notebook_launcher.kernel.cells.session_cells import SessionCells
from notebook_launcher.kernel.display import cell, sink
from notebook_launcher.kernel.failures.post_mortem import DebugMagic, PostMortem, check_answers, frames_to_debug
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.kernel.ranks import Ranks
from notebook_launcher.kernel.run.conclusion import EXIT_BUDGET
from notebook_launcher.kernel.run.handle import Run, data_of
from notebook_launcher.travel.function_call import RankFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_launcher.kernel.comms.rank_comms import RankComms
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.data import RunData


WIDGETS = "notebook_launcher.processes.notebook.rank_widgets"


class Session(SessionCells):
    """Ranks that keep their modules, their process group and their GPU memory between runs.

        with Session(4) as session:
            session.run(load, args=(path,))
            session.run(train, kwargs={"epochs": 3})

    An exception, an interrupt or a dead rank ends a run, not the session: broken ranks and groups are replaced, and a
    line in the cell reports this. The ranks keep the environment and working directory that the kernel had when the
    session started, and go on from the random states that it had when the session was made; folders that the kernel
    adds to `sys.path` later are added in the ranks before the next run. With `detached=True` they outlive the kernel,
    and the session is an `AttachedSession`, whose import path stays.

    Args:
        num_processes: Number of ranks; None: see `LaunchConfig.num_processes`.
        config: Options for all runs.
        options: Fields of `LaunchConfig` by name; they override `config`.

    Raises:
        ConfigError: An option cannot work.
        CallOrderError: The session was created inside a rank.
    """

    _built: LaunchConfig
    """The options, as `__new__` has checked them."""

    def __new__(cls, num_processes: int | None = None, *, config: LaunchConfig | None = None, **options: Any) -> Any:
        """Return a session of this kernel, or with `detached=True` an `AttachedSession`."""
        checks.check_not_in_rank("Session")
        given = {} if num_processes is None else {"num_processes": num_processes}
        built = LaunchConfig.build(config, {**options, **given})
        if not built.detached:
            session = super().__new__(cls)
            session._built = built
            return session
        from notebook_launcher.detached.host_start import start_detached_session

        return start_detached_session(built)

    def __init__(self, num_processes: int | None = None, *, config: LaunchConfig | None = None, **options: Any) -> None:
        del num_processes, config, options  # `__new__` has made the options of them.
        super().__init__()
        self._runs = SessionRuns(make_plan(self._built))
        """The ranks and the latest run; the lock is also held while the debugger is open."""
        self._is_debugging = False
        """True while the debugger is open."""
        self._claim = threading.Lock()
        """Held by the one thread that ends the session."""
        self._ended: Latch[None] = Latch()
        """Set once every process of the session is gone."""
        self._widget_call: Run | None = None
        """The latest call that only served widgets."""
        self._runs.ranks.comms.serve = weakref.WeakMethod(self._serve_widgets)
        self._magic = DebugMagic(weakref.WeakMethod(self._debug_own))
        """`%debug`, from the first failure on."""
        # A session that is garbage-collected ends its ranks.
        weakref.finalize(self, Ranks.close, self._runs.ranks)
        weakref.finalize(self, DebugMagic.remove, self._magic)

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._runs.plan.num_processes

    @property
    def config(self) -> LaunchConfig:
        """The options of all runs."""
        return self._runs.plan.config

    def __repr__(self) -> str:
        state = "closed" if self._runs.is_closed else "busy" if self._is_busy() else "open"
        return f"<Session of {self._runs.plan.summary}: {state}>"

    def __enter__(self) -> Session:
        self._check_open()
        if self.config.start_method != "fork":
            # Ranks that are forked from the kernel start with the first call instead, so that they inherit it.
            self._runs.ranks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @checks.arguments_by_name
    def run(
        self, fn: Callable[..., Any], *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Results:
        """Run a function on every rank and return the results; raises the same exceptions as `notebook_launch`."""
        checks.check_not_in_rank("Session.run")
        return self._start(fn, args, kwargs, in_cell=True).wait_in_cell()

    @checks.arguments_by_name
    def launch(
        self, fn: Callable[..., Any], *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Run:
        """Run a function on every rank without waiting, and return the run's handle; one run at a time."""
        checks.check_not_in_rank("Session.launch")
        return self._start(fn, args, kwargs, in_cell=False)

    def debug(self, rank: int | None = None) -> None:
        """Open a debugger in a rank's frames, where the last run failed on it; its prompt is `(rank 2 pdb)`.

        Leave the debugger with `q`. The session goes on with its next run.

        Args:
            rank: The rank to look into; None: the culprit, the rank that failed first.

        Raises:
            CallOrderError: There is nothing to look into, or nobody can answer the prompt; the message gives the
                reason.
            NoSuchRankError: The session has no such rank.
            KeyboardInterrupt: The interrupt button was pressed at the prompt.
        """
        checks.check_not_in_rank("Session.debug")
        with self._exclusively():
            self._check_idle("session.debug()")
            frames = self._runs.frames_to_debug(rank)
            check_answers("session.debug()")
            self._is_debugging = True
            try:
                PostMortem(self._runs.ranks, *frames, sink.make_sink()).run()
            finally:
                self._is_debugging = False

    def _debug_own(self, error: BaseException) -> bool:
        """Open the debugger if the last run raised this exception; return False if it did not."""
        latest = self._runs.latest
        if latest is None or not latest.wait(0) or latest.exception() is not error:
            return False
        self.debug()
        return True

    def forget(self) -> None:
        """Release what the ranks keep for `debug`: the frames of the last run, with their tensors. Idempotent."""
        with self._exclusively():
            self._check_idle("session.forget()")
            self._runs.forget_failures()

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold the lock; raise `CallOrderError` while the debugger is open, since a user may take any time there."""
        if self._is_debugging:
            raise CallOrderError(
                "the session is busy with its debugger. Leave the debugger first: type q at its prompt."
            )
        with self._runs.lock:
            yield

    def _check_idle(self, what: str) -> None:
        """Raise `CallOrderError` while a run goes on, and once the session is closed."""
        self._check_open()
        if self._is_busy():
            raise CallOrderError(
                f"the session is busy with {self._runs.latest!r}. {what} works once the run is over: run.wait(), or "
                "run.stop()."
            )

    def close(self) -> None:
        """Stop a run that goes on and end the ranks, without delay after an interrupt; idempotent."""
        with self._runs.lock:
            self._runs.is_closed = True
        try:
            self._await_end()
        except BaseException:
            self._runs.in_haste = True
            if (latest := self._runs.latest) is not None:
                latest.stop(wait=False, at_once=True)
            self._runs.ranks.wake()
            self._await_end()
            raise

    def _await_end(self) -> None:
        # In a thread, because an interrupt reaches only the main thread: `_end` cut short would leave processes behind.
        if not self._ended.is_set:
            thread = threading.Thread(target=self._end, name="notebook-launcher session's end", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # No room for a thread.
                self._end()
            else:
                self._ended.wait()
                thread.join()

    def _end(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # A `close` that was interrupted has already begun this.
        with contextlib.ExitStack() as stack:
            stack.callback(self._ended.set)
            stack.callback(self._magic.remove)
            self._runs.end()

    def _start(self, fn: Any, args: Any, kwargs: Any, *, in_cell: bool, scope: CallScope = EVERYWHERE) -> Run:
        with self._exclusively():
            self._check_open()
            if self._is_busy():
                raise CallOrderError(
                    f"the session is busy with {self._runs.latest!r}. Wait for it (run.wait()), or stop it "
                    "(run.stop())."
                )
            run = Run.start(self._runs.ranks, fn, args, kwargs, in_cell=in_cell, scope=scope)
            self._runs.note(run)
            magic = self._magic
            run.add_done_callback(lambda run: None if run.exception() is None else magic.install())
            return run

    def _serve_widgets(self) -> None:
        """Have the ranks handle what the page has sent to their widgets since the last run; in the main thread."""
        comms = self._runs.ranks.comms
        while not self._runs.is_closed and (found := self._begin_serving(comms)) is not None:
            with contextlib.suppress(Exception, KeyboardInterrupt):
                found.wait_in_cell()  # Errors of callbacks are printed in the rank.

    def _begin_serving(self, comms: RankComms) -> Run | None:
        with self._runs.lock:
            if self._runs.ranks.tree is None or self._is_busy() or (found := comms.take_waiting()) is None:
                return None
            rank, records = found
            scope = CallScope(
                ranks=(rank,),
                is_brief=True,
                name="widgets",
                arguments={},
                displays=lambda *_: False,
                widget_ranks=(rank,),
                comm_messages=records,
                is_widget_call=True,
            )
            with cell.answering(comms.cell_message):
                turn = RankFunction(WIDGETS, "nothing")
                self._widget_call = Run.start(self._runs.ranks, turn, (), None, in_cell=True, scope=scope)
            return self._widget_call

    @property
    def _is_at_rest(self) -> bool:
        return not self._is_busy() and self._runs.is_at_rest

    def _is_busy(self) -> bool:
        return self._runs.is_busy or (self._widget_call is not None and not self._widget_call.wait(0))

    def _check_open(self) -> None:
        if self._runs.is_closed:
            raise CallOrderError("the session is closed. Open a new one: with Session(...) as session: ...")


# --------------------------------------------------------------------------------------------------------------------
# The runs of a session: its ranks, and the latest of the runs that they serve one after the other.


class SessionRuns:
    """The ranks of a session, and the latest of their runs, in a kernel or in a host."""

    def __init__(self, plan: Plan) -> None:
        self.ranks = Ranks(plan, many_calls=True)
        """The processes of all runs."""
        self.lock = threading.Lock()
        """Held while a run is begun, so that two threads or clients cannot begin one each."""
        self.latest: Run | None = None
        """The latest run."""
        self.is_closed = False
        """True once no run may begin any more."""
        self.in_haste = False
        """True if ranks get no time for their exit handlers at the end."""
        self._has_forgotten = False
        """True if the ranks have released the frames of the latest run."""

    @property
    def plan(self) -> Plan:
        """The options of all runs, resolved against the machine."""
        return self.ranks.plan

    @property
    def is_busy(self) -> bool:
        """True while the latest run goes on."""
        return self.latest is not None and not self.latest.wait(0)

    @property
    def is_at_rest(self) -> bool:
        """True if the ranks are up and idle, and the latest run did not fail."""
        if self.is_closed or self.ranks.tree is None or self.is_busy:
            return False
        return self.latest is None or self.latest.exception() is None

    def note(self, run: Run) -> None:
        """Take a run that has begun as the latest."""
        self.latest, self._has_forgotten = run, False

    def frames_to_debug(self, rank: int | None) -> tuple[RunData, int]:
        """Return the latest run, which is over, and the rank to look into; raises as `frames_to_debug`."""
        data = None if self.latest is None else data_of(self.latest)
        return frames_to_debug(data, rank, has_forgotten=self._has_forgotten)

    def forget_failures(self) -> None:
        """Have the ranks release what they keep for a debugger: the frames of the latest run, with their tensors."""
        self._has_forgotten = True
        self.ranks.forget_failures()

    def end(self) -> None:
        """Stop a run that goes on, have the ranks exit, and show what they write meanwhile."""
        try:
            if self.latest is not None:
                self.latest.stop()
            deadline = time.monotonic() + EXIT_BUDGET
            for events in self.ranks.finish(lambda: 0.0 if self.in_haste else deadline):
                if self.latest is not None:
                    data_of(self.latest).output.show_late_output(events)
        finally:
            self.ranks.close()
