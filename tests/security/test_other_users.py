"""Another user of the machine: what they put into a folder of runs, neither runs in this kernel nor is read."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from notebook_launcher import (
    LaunchConfig,
    RankFailedError,
    ReturnValueError,
    RunFolderError,
    attach,
    launch,
    open_run,
    runs,
)
from notebook_launcher.detached import host_socket
from notebook_launcher.detached.ending import KeptParcels
from notebook_launcher.detached.host_socket import HostConnection
from notebook_launcher.detached.host_start import detached_options
from notebook_launcher.history import run_folders
from notebook_launcher.history.folder_files import open_file
from notebook_launcher.history.run_files import append, replace
from notebook_launcher.history.run_folders import SOCKET
from notebook_launcher.training.checkpoints.folders import MOVES, settle
from notebook_launcher.travel import pack_value
from tests.security.evil import Evil
from tests.security.recorded import READINGS
from tests.support.toy_runs import make_run
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER = 65534
"""The user `nobody`, as whom a program is started."""
PLANT = """
import os, sys
theirs, mine, *names = sys.argv[1:]
os.mkdir(mine, 0o755)
for name in names:
    os.symlink(f"{theirs}/{name}", f"{mine}/{name}")
with open(f"{mine}/value-0.parcel", "wb") as file:
    file.write(sys.stdin.buffer.read())
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of runs that every user can write, as /tmp."""
    # pytest's own folders are closed to other users.
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="shared-runs-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_other(program: str, *words: object, data: bytes = b"") -> None:
    command = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups", sys.executable, "-c", program]
    # The interpreter of a virtual environment may be closed to others; the system's is not.
    command[command.index(sys.executable)] = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    subprocess.run([*command, *map(str, words)], input=data, check=True, cwd="/", env={})


@as_root
def test_planted_folder_with_links_to_own_files_runs_no_code(shared: Path, tmp_path: Path) -> None:
    run = launch(int, 1, detached=True, output="none", runs_folder=shared)
    assert run.result(60)[0] == 0
    until(lambda: not (run.folder / SOCKET).exists())
    planted, mark = shared / "20991231-235959-int-abcdef", tmp_path / "their code ran"
    with open(pack_value(Evil(mark)), "rb") as parcel:
        as_other(PLANT, run.folder, planted, "ending.pickle", "summary.json", "config.json", data=parcel.read())
    assert [found.id for found in runs(shared)] == [run.id]
    assert attach(folder=shared, show=False).id == run.id
    for name, reading in READINGS.items():
        with pytest.raises(RunFolderError, match=rf"{planted} belongs to another user \({OTHER}\)"):
            reading(open_run(planted)) if name != "values" else attach(planted, show=False)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "rank-0.log").chmod(0o620), r"rank-0.log can be written by other users \(mode 620\)"),
        (lambda folder: folder.chmod(0o757), r"can be written by other users \(mode 757\).* type `chmod -R go-w "),
        (lambda folder: as_link(folder / "rank-0.log"), "rank-0.log cannot be read: it is a link"),
        (lambda folder: as_pipe(folder / "rank-0.log"), "rank-0.log is neither an ordinary file nor a socket"),
        pytest.param(
            lambda folder: os.chown(folder / "rank-0.log", OTHER, -1),
            rf"rank-0.log belongs to another user \({OTHER}\)",
            marks=as_root,
        ),
        pytest.param(
            lambda folder: os.chown(folder, OTHER, -1), rf"belongs to another user \({OTHER}\)", marks=as_root
        ),
    ],
    ids=["file that others write", "folder that others write", "link", "named pipe", "their file", "their folder"],
)
def test_file_that_is_not_the_user_s_own_is_not_opened(change, reason, tmp_path):
    folder = make_run(tmp_path, 123456, size=3)
    os.close(open_file(folder, "rank-0.log"))
    change(folder)
    with pytest.raises(RunFolderError, match=reason):
        open_file(folder, "rank-0.log")


def as_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".moved")))


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_no_reading_goes_over_a_link(recorded_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / recorded_folder.name
    shutil.copytree(recorded_folder, folder)
    (tmp_path / "aside").mkdir()
    for path in list(folder.iterdir()):
        moved = path.rename(tmp_path / "aside" / path.name)
        without = outcomes(folder)
        path.symlink_to(moved)
        linked = outcomes(folder)
        path.unlink()
        moved.rename(path)
        seen = {name for name in READINGS if linked[name] not in ("refused", without[name])}
        assert not seen, (path.name, seen)


def outcomes(folder: Path) -> dict[str, object]:
    """Return what each reading of a folder gives, `refused` for an error."""
    found: dict[str, object] = {}
    for name, reading in READINGS.items():
        found[name] = "refused"
        with contextlib.suppress(RunFolderError, ReturnValueError, RankFailedError, LookupError):
            given = reading(open_run(folder))
            found[name] = "" if name == "list" else str(given)  # A list has the size of the folder.
    return found


def addresses() -> set[str]:
    """Return where this rank and its supervisor listen, once the group has met."""
    torch.distributed.all_reduce(torch.ones(1))
    sockets = [psutil.Process().net_connections(), psutil.Process(os.getppid()).net_connections()]
    return {each.laddr.ip for each in itertools.chain(*sockets) if each.status == psutil.CONN_LISTEN}


def test_ranks_and_supervisor_listen_on_loopback_alone() -> None:
    results = launch(addresses, 2, devices="cpu", output="none", runs_folder=None).result(60)
    assert list(results) == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_detached_run_without_a_limit_ends_after_a_week() -> None:
    assert detached_options(LaunchConfig()).timeout == 7 * 24 * 3600
    assert detached_options(LaunchConfig(timeout=5)).timeout == 5


@as_root
def test_other_end_of_another_user_is_not_spoken_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path, 123456)
    monkeypatch.chdir(folder)
    theirs = socket.socket(socket.AF_UNIX)
    theirs.bind(SOCKET)  # a path of a parallel worker is too long for a socket
    os.seteuid(OTHER)  # Whose socket it is, the system notes when it listens.
    try:
        theirs.listen()
    finally:
        os.seteuid(0)
    with theirs, pytest.raises(PermissionError, match=f"belongs to user {OTHER}, and this one to user 0"):
        HostConnection(folder)


@as_root
def test_folder_that_was_put_in_a_run_s_place_gets_nothing(shared: Path) -> None:
    folder = make_run(shared, 123456)
    append(folder / "rank-7.log", b"mine")
    assert (folder / "rank-7.log").stat().st_mode & 0o077 == 0
    folder.rename(shared / "moved")
    as_other("import os, sys; os.mkdir(sys.argv[1], 0o777); os.chmod(sys.argv[1], 0o777)", folder)
    for write in (
        lambda: append(folder / "rank-0.log", b"secret"),
        lambda: replace(folder / "summary.json", b"secret", folder / "summary.json.part"),
        lambda: KeptParcels(folder).keep_value(pack_value("secret")),
    ):
        with pytest.raises(OSError, match=rf"{folder} belongs to another user \({OTHER}\)"):
            write()
    assert not list(folder.iterdir())


@as_root
def test_unfinished_save_of_another_user_is_left_alone(tmp_path: Path) -> None:
    target, ready = tmp_path / "save", tmp_path / ".save.ready-00"
    ready.mkdir()
    (ready / "model.bin").write_text("theirs")
    (ready / MOVES).write_text('{"files": ["model.bin"], "stale": []}')
    os.chown(ready, OTHER, OTHER)
    settle(target)
    assert not target.exists()
    os.chown(ready, 0, 0)
    settle(target)
    assert (target / "model.bin").read_text() == "theirs"


@as_root
def test_host_of_another_user_is_not_asked(tmp_path: Path) -> None:
    folder = make_run(tmp_path, 123456)
    host_socket.listen(folder).close()
    for change in (lambda: os.chown(folder / SOCKET, OTHER, -1), lambda: os.chown(folder, OTHER, -1)):
        change()
        with pytest.raises(RunFolderError, match=rf"belongs to another user \({OTHER}\)"):
            HostConnection(folder)


def test_socket_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = make_run(tmp_path, 123456), make_run(tmp_path, 123457)
    with host_socket.listen(elsewhere):
        (folder / SOCKET).symlink_to(elsewhere / SOCKET)
        with pytest.raises(RunFolderError, match="neither an ordinary file nor a socket"):
            HostConnection(folder)


def test_making_room_leaves_what_a_link_leads_to(tmp_path: Path) -> None:
    project, home = tmp_path / "project", tmp_path / "runs"
    project.mkdir()
    (project / run_folders.CONFIG).write_text("{}")
    for number in range(3):
        make_run(home, 123456 + number)
    link = home / "20200101-000000-train-abcdef"
    link.symlink_to(project)
    assert len(runs(home)) == 3
    run_folders.prune(home, max_runs=3)
    assert len(runs(home)) == 3
    run_folders.prune(home, max_runs=1)
    run_folders.remove(link)
    assert len([path for path in home.iterdir() if not path.is_symlink()]) == 1
    assert (project / run_folders.CONFIG).read_text() == "{}"


def test_edit_writes_through_no_link(tmp_path: Path) -> None:
    folder, document = make_run(tmp_path, 123456), tmp_path / "document"
    document.write_text("mine")
    (folder / "edits.json.part").symlink_to(document)
    with pytest.raises(OSError, match="symbolic link"):
        open_run(folder).edit(notes="theirs")
    assert document.read_text() == "mine"


def test_changed_bit_of_a_result_is_an_error_that_names_the_file(recorded_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / recorded_folder.name
    shutil.copytree(recorded_folder, folder)
    path = folder / "value-1.parcel"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    results = attach(folder, show=False).result(30)
    assert results[0]["name"] == "fine"
    with pytest.raises(ReturnValueError, match=rf"{path} is damaged: .* checksum"):
        results[1]
    path = folder / "ending.pickle"
    path.write_bytes(path.read_bytes().replace(b"done", b"dome"))
    with pytest.raises(RunFolderError, match=rf"{path} is damaged: .* checksum"):
        attach(folder, show=False).result(30)


def test_folder_of_a_run_is_closed_to_others(recorded_folder: Path) -> None:
    assert recorded_folder.stat().st_mode & 0o777 == 0o700
    # The test wrote that table itself.
    ours = [path for path in recorded_folder.iterdir() if path.name != "picture-99.csv"]
    assert {path.stat().st_mode & 0o077 for path in ours} == {0}
