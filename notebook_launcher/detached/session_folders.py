"""The folders of detached sessions, in which `attach_session(...)` and `runs()` find them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from notebook_launcher.detached.host_socket import Clients
from notebook_launcher.errors import ConfigError, ResourceError
from notebook_launcher.history import run_folders
from notebook_launcher.history.encoding import encode, encode_snapshot
from notebook_launcher.history.folder_files import read_json
from notebook_launcher.history.run_files import replace
from notebook_launcher.history.run_folders import SESSION_SOCKET, is_session
from notebook_launcher.wording import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.history.schema import RunSnapshot


UNNAMED = "session"
"""Name in `runs()` of sessions without a name, of which there may be any number."""


def session_name_of(config: LaunchConfig) -> str:
    """Return the name of a session."""
    return config.name or UNNAMED


def live_sessions(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield folder and name of each session in a folder whose host lives, the newest first."""
    for run_id in run_folders.list_ids(home):
        folder = home / run_id
        if is_session(folder):
            summary = read_json(folder, run_folders.SUMMARY)
            if summary is not None and run_folders.is_live(folder, summary):
                yield folder, str(summary.get("name"))


def check_name_is_free(home: Path, config: LaunchConfig) -> None:
    """Raise `ConfigError` if a session that lives has the name."""
    for folder, name in live_sessions(home):
        if config.name is not None and name == config.name:
            age = format_seconds(max(0.0, time.time() - run_folders.time_in(folder.name)))
            raise ConfigError(
                f"name={name!r}: a detached session of this name has been running for {age} ({folder.name}). "
                f"attach_session({name!r}) reconnects to it, and attach_session({name!r}).close() ends it.",
                field="name",
            )


def make(
    config: LaunchConfig, snapshot: Callable[[], RunSnapshot], find: Callable[[str], Callable[..., object]]
) -> tuple[Path, Clients]:
    """Make the folder of a session; return it with the session's socket.

    Raises:
        ConfigError: A session that lives has the name.
        OSError: The folder cannot be made.
    """
    home = run_folders.find_home(config.runs_folder)
    assert home is not None
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_name_is_free(home, config)
    folder = home / run_folders.new_id(session_name_of(config), time.time())
    folder.mkdir(mode=0o700)
    clients = Clients(folder, find, SESSION_SOCKET)
    write_summary(folder, snapshot())
    return folder, clients


def no_folder(config: LaunchConfig, error: OSError) -> ResourceError:
    """Return the error of a launch whose folder cannot be made."""
    home = run_folders.find_home(config.runs_folder)
    return ResourceError(
        f"the folder of a detached run or session cannot be made in {home}: {error.strerror or error}. attach() finds "
        "the run by this folder, so make room there, or name a folder on another disk: runs_folder='a/folder'."
    )


def write_summary(folder: Path, snapshot: RunSnapshot) -> None:
    """Write what `runs()` shows of a session; a full disk costs the session nothing."""
    snapshot = dataclasses.replace(snapshot, id=folder.name)
    data = encode({**encode_snapshot(snapshot), "kernel": run_folders.identify()}).encode("ascii")
    with contextlib.suppress(OSError):
        replace(folder / run_folders.SUMMARY, data, folder / run_folders.PART)
