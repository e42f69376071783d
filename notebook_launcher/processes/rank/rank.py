"""A rank: receives calls, runs them, and reports their outcomes.

A rank is a plain process in a session of its own, so that a signal to the session reaches its data-loader
workers too. It runs user code in its main thread, starts no other thread before that has returned, and dies with its
supervisor.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import faulthandler
import gc
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import types
from typing import TYPE_CHECKING, Any

from notebook_launcher import context, travel
from notebook_launcher.context import ENDED, RankContext, begin_call, current, enter, notify
from notebook_launcher.errors import ResourceError, ReturnValueError
from notebook_launcher.messaging import board_layout, messages
from notebook_launcher.messaging.channel import Channel, anonymous_file
from notebook_launcher.processes import boot, inherited
from notebook_launcher.processes.failures import KeptFailure, describe_exception, users_place
from notebook_launcher.processes.notebook import frontend
from notebook_launcher.processes.rank import frameworks, rank_process, user_function
from notebook_launcher.processes.rank.rank_process import flush
from notebook_launcher.processes.rank.rendezvous import Rendezvous, replace_group_functions, torchrun_environment
from notebook_launcher.processes.rank.user_function import LocalModules, call_function, exit_code
from notebook_launcher.travel import namespace, random_states, settings
from notebook_launcher.travel.replacements import Replacer

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.processes.rank.rank_process import RankStart


def main(fd: int) -> None:
    """Run a rank in a fresh interpreter; `fd` is the descriptor of the file with its `RankStart`."""
    with open(fd, "rb") as file:
        file.seek(0)
        start: RankStart = pickle.load(file)
    boot.enter_kernel_surroundings(start.setup)
    os._exit(run_rank(start))


def run_rank(start: RankStart, inherited_call: travel.FunctionCall | None = None) -> int:
    """Serve the kernel until it sends `Finish` or is gone; return the exit status.

    Args:
        start: The rank's start.
        inherited_call: The first call, if this process is a fork of the kernel.
    """
    rank_process.begin()
    rank_process.redirect_output(start)
    if start.setup.start_method == "spawn":
        # Forked ranks inherit torch and this change to torch from their parent.
        replace_group_functions()
    else:
        inherited.forget_parent(start.setup.start_method)
    process = _RankProcess(start, inherited_call)
    try:
        process.serve()
    except KeyboardInterrupt:
        return 130
    return rank_process.leave()


class _RankProcess:
    def __init__(self, start: RankStart, inherited_call: travel.FunctionCall | None) -> None:
        self._number = start.rank
        self._setup = start.setup
        self._inherited_call = inherited_call
        """The first call, if the rank is a fork of the kernel."""
        self._channel = Channel(socket.socket(fileno=start.channel_fd))
        self._inbox = Inbox(start.rank, self._channel, self._handle_comm)
        self._rendezvous = Rendezvous(start.rank, start.setup)
        self._modules = LocalModules(start.setup.cwd) if start.setup.many_calls else None
        """The user's modules, which a rank of a session imports again after they were edited."""
        self._stage: messages.Stage = "function"
        """The present stage of a call, as in `messages.Raised.stage`."""
        self._is_interruptible = False
        """True while an interrupt may raise `KeyboardInterrupt`. Set and cleared by assignments and not by a context
        manager, whose `__exit__` an interrupt could end before the flag is cleared."""
        self._failure = KeptFailure() if start.setup.keeps_failures else None
        """Keeps the exception of the last call for a debugger."""
        self._has_begun_random = False
        """True once a function was called: the generators go on from there, in later calls of a session, too."""
        is_fork = start.setup.start_method == "fork"
        if not is_fork:
            sys.modules["__main__"] = types.ModuleType("__main__")
        self._steps = settings.SetupSteps()
        """The steps that this rank has run before its calls."""
        self._replacer = Replacer()
        self._settings = settings.KernelSettings(settings.read_settings() if is_fork else None)
        os.environ.update(torchrun_environment(start.setup, start.rank))
        board = mmap.mmap(start.board_fd, board_layout.BOARD_SIZE)
        enter(
            RankContext(
                rank=start.rank,
                num_processes=start.setup.num_processes,
                pid=os.getpid(),
                settings=start.setup.settings,
                send=self._channel.send,
                board=board,
                rendezvous=self._rendezvous,
                num_nodes=start.setup.place.num_nodes,
                next_change=self._inbox.next_change,
            )
        )
        self._widgets = frontend.connect(
            start.rank, self._channel.send_and_wait, self._inbox.ask, send_soon=self._channel.send
        )
        if start.setup.start_method != "forkserver":  # Its forks have inherited the changes.
            frameworks.patch_when_imported()

    def serve(self) -> None:
        stacks = anonymous_file("stacks")
        faulthandler.enable(file=2)
        faulthandler.register(messages.DUMP_SIGNAL, file=stacks, all_threads=True)
        rank_process.set_threads(self._setup.threads_per_process)
        rank_process.settle_before_forks()
        signal.signal(messages.COMM_SIGNAL, self._on_comm_signal)
        signal.siginterrupt(messages.COMM_SIGNAL, False)
        self._channel.send(messages.RankReady(rank=self._number), [stacks])
        while (received := self._inbox.receive()) is not None:
            match received:
                case messages.RunCall() as call, fds:
                    self._run(call, fds)
                case messages.LeaveGroup(), _:
                    self._leave_group()
                case messages.DebugFailure(), _:
                    self._debug()
                case messages.ForgetFailure(), _:
                    self._forget_failure()
                case messages.Finish(), _:
                    self._forget_failure()
                    return
                case messages.InputReply() | messages.Change(), _:
                    pass  # It belongs to a request that was interrupted, or to a call that has ended.
                case unknown, _:
                    raise TypeError(f"rank {self._number} got an unknown message: {unknown!r}")

    def _leave_group(self) -> None:
        """Release peers that wait for this rank; a debugger in kept frames still finds the group's rank and size."""
        with contextlib.suppress(Exception):
            if self._failure is not None and self._failure.is_kept:
                self._rendezvous.hang_up()
            else:
                self._rendezvous.leave()

    def _run(self, call: messages.RunCall, fds: list[int]) -> None:
        self._inbox.can_ask = call.can_ask
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(call.restart_count)
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(call.max_restarts)
        self._widgets.begin_call(call.widget_ranks)
        self._stage = "function"
        if not call.keeps_failure:
            self._forget_failure()
        begin_call(call.call_id, call.checkpoints)
        # Set for each call, because the user's code may have set another handler in an earlier call.
        signal.signal(signal.SIGINT, self._on_interrupt)
        if self._modules is not None and (edited := self._modules.forget_edited()):
            notify(f"{', '.join(edited)} changed: the ranks import the notebook's own modules again")
        user_function.add_folders(call.first_folders, call.last_folders)
        try:
            self._is_interruptible = True
            try:
                record, fd = self._perform(call, fds)
            finally:
                self._is_interruptible = False
        except BaseException as error:  # any exception of user code is an outcome
            record, fd = self._raised(call, error)
        is_spent = isinstance(record, messages.Raised) and record.is_spent
        if self._modules is not None and not is_spent:  # A spent rank may have no descriptor left to look at files.
            self._modules.remember()
        rank_process.flush()
        with contextlib.suppress(OSError):
            self._channel.send(record, [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)

    def _report_unread_settings(self) -> None:
        context = current()
        if self._setup.many_calls or context is None or context.settings_are_read:
            return
        if unread := context.settings.asked_for():
            given = ", ".join(f"{name}={value!r}" for name, value in unread.items())
            notify(f"{given} had no effect: the function made no Accelerator()")

    def _perform(self, call: messages.RunCall, fds: list[int]) -> tuple[object, int | None]:
        if self._setup.use_gpu:
            # Before the call is unpacked: a captured torch.Generator("cuda") would make a context on the first GPU.
            rank_process.choose_gpu(self._number, self._setup.place.local_rank(self._number))
        if call.ranks is not None and self._number not in call.ranks:
            # It takes no part, except that a new process group needs all ranks.
            for each in fds:
                os.close(each)
            self._rendezvous.join(call.generation)
            return self._returned(call), None
        self._stage = "arrive"
        function_call = self._take_call(fds)
        self._stage = "function"
        self._rendezvous.join(call.generation)
        self._channel.send(messages.CallStarted(call_id=call.call_id))
        self._has_begun_random = True
        value = self._call_function(call, function_call)
        if (context := current()) is not None:
            context.set_activity(ENDED)
        self._report_unread_settings()
        self._rendezvous.drop_destroyed()
        self._stage = "return"
        if not has_free():
            raise none_left("the function has returned, but its value cannot travel")
        fd: int | None = None
        unsent = ""
        try:
            fd = travel.pack_value(value)
        except (ResourceError, ReturnValueError) as error:  # The run has succeeded; it must not fail now.
            unsent = f"{error}{users_place(error.__cause__)}"
        return self._returned(call, unsent), fd

    def _take_call(self, fds: list[int]) -> travel.FunctionCall:
        """Unpack the function and its arguments; without a descriptor, they were inherited by a fork of the kernel."""
        if not fds:
            if self._inherited_call is None:  # Linux has dropped the descriptor, because the table was full.
                self._stage = "function"
                raise none_left("the function was not called, because the call could not arrive")
            namespace.note_inherited()
            self._steps.inherit(self._inherited_call.steps)
            self._stage = "function"
            self._begin_random()
            for step in self._inherited_call.steps:
                self._steps.run(step)
            return self._inherited_call
        self._inherited_call = None
        self._begin_random()
        function_call, overwritten = travel.unpack_call(
            fds[0],
            follow_settings=self._settings.follow,
            replacer=self._replacer,
            run_step=self._run_step,
        )
        if overwritten:
            notify(
                f"{', '.join(overwritten)}: the notebook's value replaced the value that an earlier run left on the "
                "ranks. To keep a variable on the ranks, give it a name that the notebook does not use."
            )
        return function_call

    def _begin_random(self) -> None:
        """Give the generators the launch's seed, or the kernel's states; only before the first call of a function."""
        if self._has_begun_random:
            return
        setup = self._setup
        assert setup.random is not None
        random_states.begin_random(setup.random, setup.rank_seeds, self._number, use_gpu=setup.use_gpu)
        if setup.rank_seeds is None and setup.num_processes > 1:
            seed = sys.modules["torch"].initial_seed()
            context.enter_random_stage(context.RandomStage(seed, seeding=context.newest_seeding()))

    def _run_step(self, step: settings.SetupStep) -> None:
        """Run code that comes before the function; an error of it is the user's, as one of the function is."""
        self._stage = "function"
        self._steps.run(step)
        if step.shared is not None:  # The kernel has run it, too, and may have seeded or drawn since.
            self._begin_random()
        self._stage = "arrive"

    def _call_function(self, call: messages.RunCall, function_call: travel.FunctionCall) -> Any:
        """Call the function, and wait for the work that it has queued on a GPU; return its value."""
        try:
            self._on_comm_signal(0, None)  # Messages whose signal came before the call were not handled then.
            for message in call.comm_messages:
                self._widgets.handle(message)
            value = call_function(*function_call[:3])
            user_function.finish()
        except SystemExit as error:
            if self._setup.many_calls and isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None  # Lightning's Trainer exits after an interrupt; a session goes on.
            if error.code not in (None, 0):
                raise
            return None
        else:
            return value
        finally:
            _end_training_records()
            frontend.flush_figures()
            rank_process.mend_output()

    def _returned(self, call: messages.RunCall, unsent: str = "") -> messages.Returned:
        return messages.Returned(
            call_id=call.call_id,
            time=time.monotonic(),
            peak_rss=_peak_rss(),
            group=self._rendezvous.state(),
            unsent=unsent,
        )

    def _raised(self, call: messages.RunCall, error: BaseException) -> tuple[object, int | None]:
        now = time.monotonic()
        is_full = not has_free()
        if is_full:  # Variables of the frames may hold open files. Line numbers stay, so the traceback is complete.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
        is_spent = user_function.is_broken() or (is_full and not has_free())
        keeps = self._setup.many_calls and not is_spent and not is_full
        if self._failure is not None and not is_full:
            self._failure.keep(error)
        record = messages.Raised(
            call_id=call.call_id,
            time=now,
            peak_rss=_peak_rss(),
            stage=self._stage,
            report=describe_exception(error),
            group=self._rendezvous.state(),
            exit_code=exit_code(error),
            kept=self._failure.measure() if self._failure is not None and keeps else None,
            is_spent=is_spent,
        )
        fd = None
        with contextlib.suppress(Exception):
            fd = travel.pack_exception(error)
        return record, fd

    def _on_comm_signal(self, _signum: int, _frame: Any) -> None:
        """Read what the page has sent to widgets during a call; Python calls this between two bytecodes."""
        if self._is_interruptible:
            for record in self._inbox.take_comm_messages():
                self._widgets.handle(record)

    def _handle_comm(self, record: messages.CommMessage) -> None:
        """Handle a message to a widget, between calls too, where an interrupt ends only this."""
        before, self._is_interruptible = self._is_interruptible, True
        try:
            self._widgets.handle(record)
        except KeyboardInterrupt:
            if before:
                raise
        finally:
            self._is_interruptible = before

    def _forget_failure(self) -> None:
        if self._failure is not None:
            self._failure.forget()

    def _debug(self) -> None:
        # A cell waits for the debugger, even if the run itself was launched in the background.
        self._inbox.can_ask = self._is_interruptible = True
        try:
            if self._failure is not None:
                self._failure.debug(self._number, self._inbox.ask_text)
        except KeyboardInterrupt:
            pass  # The user leaves the debugger.
        finally:
            self._is_interruptible = False
            frontend.flush_figures()
            rank_process.mend_output()
            self._channel.send(messages.DebugEnded())

    def _on_interrupt(self, _signum: int, _frame: Any) -> None:
        if self._is_interruptible:
            raise KeyboardInterrupt


def _end_training_records() -> None:
    """Send the rest of the phases' times, and end a profile that is under way."""
    context = current()
    if context is None:
        return
    with contextlib.suppress(OSError):  # The kernel is gone.
        if context.clock is not None:
            context.clock.flush()
        if context.safepoint is not None:
            context.safepoint.close()


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --------------------------------------------------------------------------------------------------------------------
# The records that a rank receives: in their order; a rank that waits for one record keeps the others for later.


class Inbox:
    """Records from the kernel to one rank.

    Args:
        rank: The number of the rank.
        channel: Its end of the channel.
        handle_comm: Handles what the page sends to widgets, while the rank waits for another record.
    """

    def __init__(self, rank: int, channel: Channel, handle_comm: Callable[[messages.CommMessage], None]) -> None:
        self._rank = rank
        self._channel = channel
        self._handle_comm = handle_comm
        self.can_ask = True
        """True if the user can answer: a cell waits for the run, or clients may attach to it."""
        self._answering = threading.Lock()
        """Held while a thread waits for the user's input, so that questions are asked one after another."""
        self._num_asked = 0
        """Number of the last question."""
        self._unread: collections.deque[tuple[Any, list[int]]] = collections.deque()
        """Records that came while the rank waited for another record; they are read first."""
        self._receiving: list[bool] = []
        """Not empty while a thread waits for a record, and so handles what the page sends to widgets."""

    def receive(self) -> tuple[Any, list[int]] | None:
        """Return the next record and the descriptors beside it; None once the kernel is gone."""
        return self._next(lambda _: True)

    def next_change(self) -> messages.Change:
        """Return the next change, and keep other records for later."""
        received = self._next(lambda record: isinstance(record, messages.Change))
        if received is None:
            raise context.RunStopped("the kernel went away")
        change: messages.Change = received[0]
        return change

    def _next(self, is_wanted: Callable[[Any], bool]) -> tuple[Any, list[int]] | None:
        """Return the next record that is wanted, and keep others for later; None if the kernel is gone.

        What the page sends to widgets is handled meanwhile.
        """
        self._receiving.append(True)  # First: from here on `take_comm_messages` leaves all records to this method.
        try:
            for kept in self._unread:
                if is_wanted(kept[0]):
                    self._unread.remove(kept)
                    return kept
            while (received := self._channel.receive()) is not None:
                if isinstance(received[0], messages.CommMessage):
                    self._handle_comm(received[0])
                elif is_wanted(received[0]):
                    return received
                else:
                    self._unread.append(received)
            return None
        finally:
            self._receiving.pop()

    def take_comm_messages(self) -> list[messages.CommMessage]:
        """Return what the page has sent to widgets, without waiting; nothing while a thread waits for a record."""
        comm_messages: list[messages.CommMessage] = []
        if self._receiving:
            return comm_messages
        self._receiving.append(True)
        try:
            with contextlib.suppress(BlockingIOError):
                while (received := self._channel.receive(wait=False)) is not None:
                    if isinstance(received[0], messages.CommMessage):
                        comm_messages.append(received[0])
                    else:
                        self._unread.append(received)
        finally:
            self._receiving.pop()
        return comm_messages

    def ask_text(self, prompt: str) -> str:
        """Return the line that the user types after a prompt; raises EOFError if no user can answer."""
        reply = self.ask(messages.InputRequest(prompt=prompt))
        if reply.text is None:
            raise EOFError(reply.reason)
        return reply.text

    def ask(self, request: messages.InputRequest) -> messages.InputReply:
        """Ask the user, and wait for the answer."""
        if not self.can_ask:
            reason = (
                f"rank {self._rank} asked for input, but this run was launched in the background, so no cell can "
                "answer. Use notebook_launch(...), or detached=True, or pass the value as an argument."
            )
            return messages.InputReply(text=None, reason=reason)
        with self._answering:
            flush()
            self._num_asked += 1
            self._channel.send(dataclasses.replace(request, number=self._num_asked))
            # The answer to an earlier question, whose wait was interrupted, may still come.
            received = self._next(
                lambda record: isinstance(record, messages.InputReply) and record.number == self._num_asked
            )
        if received is None:
            return messages.InputReply(text=None, reason="the kernel went away")
        reply: messages.InputReply = received[0]
        return reply


# --------------------------------------------------------------------------------------------------------------------
# File descriptors of a rank: each call and value travels by one, and user code may have left none.


def has_free() -> bool:
    """Return True if this process can open one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


def none_left(what: str) -> ResourceError:
    """Return the error that this process has no descriptor left; `what`: a clause about what failed therefore."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        errno.EMFILE,
        f"{what}: this rank has no file descriptor left (its limit is {limit:,}). Close files, sockets and memory maps "
        "that the function opens, or raise `ulimit -n` in the shell that starts Jupyter.",
    )
