"""The check for leaks reports every kind of leftover, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORK_SERVER = "notebook_launcher.processes.forkserver"

HEADER = '''
import os, signal, socket, subprocess, sys, tempfile, threading
import psutil, pytest
from tests.support import leaks

leaks.PATIENCE = 0.1
kept = []

SUPERVISED = (
    "os.setsid(); r, w = os.pipe(); "
    "os.fork() or os.setsid() or os.write(w, b'.') and signal.pause(); "
    "os.read(r, 1)"
)

def start_server(body, *words):
    code = f"import os, signal; {body}; print(flush=True); signal.pause()"
    server = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
    with server.stdout:
        server.stdout.readline()
    kept.append(server)

LISTENER = """
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0))]
print(flush=True)
for line in sys.stdin:
    if line.strip() == "replace":
        sockets.pop().close()
    sockets.append(socket.create_server(("127.0.0.1", 0)))
    print(flush=True)
"""

@pytest.fixture(scope="module")
def listener():
    words = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        def ask(what):
            print(what, file=process.stdin, flush=True)
            process.stdout.readline()
        yield ask

READ, WRITE = os.pipe()
STRANGER = f"""
import mmap, os, tempfile
file = tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="psm_")
file.truncate(1)
memory = mmap.mmap(file.fileno(), 1)
print(flush=True)
os.read({READ}, 1)
"""

def start_stranger():
    # Not a descendant of this process, and not of its session; ends when this process does.
    words = ["bash", "-c", 'setsid "$@" & disown', "bash", sys.executable, "-c", STRANGER]
    environment = {name: value for name, value in os.environ.items() if name != leaks.MARK}
    with subprocess.Popen(words, env=environment, pass_fds=[READ], stdout=subprocess.PIPE) as starter:
        starter.stdout.readline()

def await_sleeper():
    # Between a fork and the end of an exec, a process' environment cannot be read.
    while ["sleep", "61"] not in [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]:
        pass

@pytest.mark.leaks("to see that a reason is accepted")
def test_excused():
    os.environ["EXCUSED"] = "1"

@pytest.mark.leaks
def test_no_reason():
    pass
'''

LEAKS = {
    "process": ("sleep 60", "subprocess.Popen(['sleep', '60'])"),
    "orphan": (
        "sleep 61",
        "subprocess.run('setsid sleep 61 & disown', shell=True, executable='/bin/bash'); await_sleeper()",
    ),
    "thread": ("thread <Thread", "threading.Thread(target=threading.Event().wait, daemon=True).start()"),
    "descriptor": ("-> /dev/null", "kept.append(os.open('/dev/null', os.O_RDONLY))"),
    "listener": ("listening socket", "kept.append(socket.create_server(('127.0.0.1', 0)))"),
    "further_listener": ("listening socket", "listener('add')"),
    "file": ("/notebook-launcher-", "kept.append(tempfile.NamedTemporaryFile(prefix='notebook-launcher-'))"),
    "shared_memory": ("file /dev/shm/", "kept.append(tempfile.NamedTemporaryFile(dir='/dev/shm', prefix='psm_'))"),
    "variable": ("LEFT_BEHIND was None and is '1'", "os.environ['LEFT_BEHIND'] = '1'"),
    "handler": ("handler of signal 10", "signal.signal(signal.SIGUSR1, lambda *_: None)"),
    "directory": ("working directory", "os.chdir('/')"),
    "zombie": ("zombie", "os.fork() or os._exit(0)"),
    # Only the server itself and its deputy, which is in its session, are tolerated.
    "forked_from_server": (FORK_SERVER, f"start_server(SUPERVISED, '{FORK_SERVER}')"),
}
"""By name: what the test is told, and what it leaves."""
HARMLESS = {
    "nothing": "pass",
    "replaced_listener": "listener('replace')",
    "patched": "monkeypatch.setenv('LEFT_BEHIND', '1')",
    "server": f"start_server('pass', '{FORK_SERVER}')",
    "deputy": f"start_server('os.setsid(); os.fork() or signal.pause()', '{FORK_SERVER}')",
    "others_memory": "start_stranger()",
    "late": "leaks.PATIENCE = 10; threading.Thread(target=subprocess.run, args=(['sleep', '0.3'],)).start()",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run one program of leaky tests; return what each was told, "" if it passed."""
    folder = tmp_path_factory.mktemp("leaky")
    tests = {name: body for name, (_, body) in LEAKS.items()} | HARMLESS
    source = HEADER + "".join(
        f"\ndef test_{name}(monkeypatch, listener):\n    {body}\n" for name, body in tests.items()
    )
    (folder / "test_leaky.py").write_text(source, encoding="utf-8")
    report = folder / "report.xml"
    options = f"-p tests.support.leaks -c pyproject.toml --rootdir {folder} -p no:cacheprovider".split()
    options += ["-p", "no:randomly"]  # One test sets the patience of those after it.
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-W", "ignore", f"--junitxml={report}", str(folder)],
        cwd=ROOT,
        check=False,
        capture_output=True,
    )
    found: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        words = [child.text or "" for child in case if child.tag in {"error", "failure"}]
        name = str(case.get("name")).removeprefix("test_")
        found[name] = found.get(name, "") + "".join(words)
    return found


@pytest.mark.parametrize("name", LEAKS)
def test_leak_fails_the_test_that_left_it(outcomes, name):
    assert LEAKS[name][0] in outcomes[name]


@pytest.mark.parametrize("name", [*HARMLESS, "excused"])
def test_harmless_remains_pass(outcomes, name):
    assert outcomes[name] == ""


def test_leak_does_not_fail_the_next_test(outcomes):
    assert "sleep 60" not in outcomes["orphan"]


def test_leaks_marker_without_reason_fails(outcomes):
    assert "needs a reason" in outcomes["no_reason"]
