"""`attach`: show a detached run, or the call of a detached session, in a terminal until it is over, or stop it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from notebook_launcher.command_line.parser import Command, positive_number

if TYPE_CHECKING:
    import argparse

    from notebook_launcher.detached.attached_session import AttachedSession


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        metavar="ID",
        help="its id, the beginning of its id, or a session's name; the latest one for `last`, or if omitted",
    )
    parser.add_argument("--folder", default="auto", metavar="FOLDER", help="the folder that holds the runs' folders")
    parser.add_argument(
        "--since", reads=positive_number, metavar="SECONDS", help="output of the last SECONDS; all if omitted"
    )
    parser.add_argument("--stop", action="store_true", help="stop the run, or close the session")


def _run(options: argparse.Namespace) -> int:
    from notebook_launcher.detached.attaching import attach, find_session

    if options.run is not None and (session := find_session(options.run, folder=options.folder)) is not None:
        return _attend(session, stops=options.stop)
    try:
        run = attach(options.run, folder=options.folder, since=options.since)
    except LookupError as missing:
        raise LookupError(f"{missing}{_sessions(options.folder)}") from None
    try:
        if options.stop:
            run.stop()
        run.wait()
    except KeyboardInterrupt:
        again = f"`notebook-launcher attach {run.id}` reconnects to it, with --stop to end it"
        print(f"\n{run.id} is still running; {again}", file=sys.stderr)
        raise
    error = run.exception()
    if error is not None:
        print(f"{run.id}: {run.state}: {type(error).__name__}: {error}", file=sys.stderr)
    return 0 if error is None or (options.stop and run.state == "stopped") else 1


def _sessions(folder: str) -> str:
    """Return a sentence with the names of the sessions that are open; empty if none is."""
    from notebook_launcher.archive.listing import require_home
    from notebook_launcher.detached.session_folders import live_sessions

    names = [repr(name) for _, name in live_sessions(require_home(folder))]
    return f" Open sessions: {', '.join(names)}." if names else ""


def _attend(session: AttachedSession, *, stops: bool) -> int:
    """Show the call of a session until it is over, or close the session."""
    if stops:
        session.close()
        return 0
    call = session.latest if session.is_busy else None
    if call is None:
        print(f"{session!r}: no call is running")
        return 0
    call.follow_in_cell()
    try:
        call.wait()
    except KeyboardInterrupt:
        print(f"\n{call.id} is still running in the session {session.name}", file=sys.stderr)
        raise
    return 0 if call.exception() is None else 1


COMMAND = Command(
    name="attach",
    summary="show a run that outlives its kernel, or stop it",
    description="""\
Show the output of a run that was launched with detached=True, until the run is over. Ctrl-C leaves it
running. `runs list --state running` lists the runs in progress.

  notebook-launcher attach                     the latest one
  notebook-launcher attach 20261121-14 --stop
  notebook-launcher attach exp                 the call of Session(4, name="exp", detached=True)
  notebook-launcher attach exp --stop          close the session""",
    add_arguments=_add_arguments,
    run=_run,
)
