"""Secrets that a user passes or has in the environment: no file and no report has them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import ConfigError, ConfigPanel, LaunchConfig, export, launch, open_run
from notebook_launcher.command_line.program import main

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "hunter2"
TOKEN = f"hf_{SECRET}abcdefghijklmnop"
URL = f"postgres://user:{SECRET}@host"
ENV = {"PGPASSWORD": SECRET, "DB_PASS": SECRET, "DATABASE_URL": URL, "MY_TOKEN": SECRET, "PLAIN": TOKEN}


def work(url: str, api_key: str, words: str) -> str:
    # An example: "hf_hunter2abcdefghijklmnop".
    return f"{url[:0]}{api_key[:0]}{words[:0]}{os.environ['PGPASSWORD'][:0]}{os.environ['MY_FLAG']}"


def test_folder_of_a_run_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Outside a repository, whose changes may be anything.
    env = {**ENV, "MY_FLAG": "other", "NCCL_DEBUG": "WARN"}
    run = launch(
        work, 1, args=(URL, "secret"), kwargs={"words": f"the key is {TOKEN}"}, env=env, runs_folder=tmp_path,
        detached=True, output="none",
    )  # fmt: skip
    assert run.result(60)[0] == "other"
    for path in run.folder.iterdir():
        if path.name not in {"host.sock", "value-0.parcel"}:
            assert SECRET.encode() not in path.read_bytes(), path.name
    recorded = open_run(run.folder)
    assert recorded.config.env == {"NCCL_DEBUG": "WARN"}
    assert recorded.snapshot().config["env"] == {**dict.fromkeys(ENV), "MY_FLAG": None, "NCCL_DEBUG": "WARN"}
    assert recorded.snapshot().arguments == {
        "url": "'postgres://user:***@host'",
        "words": "'the key is ***'",
    }


def test_exported_files_ask_for_secrets(tmp_path: Path) -> None:
    written = export(work, tmp_path / "work.py", 1, args=("", "", ""), env={**ENV, "MY_FLAG": "1"}, seed=1)
    assert "set PGPASSWORD, DB_PASS, DATABASE_URL, MY_TOKEN, PLAIN where the script runs" in repr(written)
    held = export(work, tmp_path / "held.py", 1, args=("", "hunter2", ""), seed=1).script
    assert held.stat().st_mode & 0o777 == 0o600
    settings = LaunchConfig(num_processes=1, devices="cpu", env={**ENV, "MY_FLAG": "1"}).to_yaml(tmp_path / "my.yaml")
    for path in (written.script, settings):
        assert SECRET not in path.read_text().replace(TOKEN, "")
        assert path.stat().st_mode & 0o777 == 0o600
    assert "secrets: DATABASE_URL, DB_PASS, MY_TOKEN, PGPASSWORD, PLAIN. Pass them as env=" in settings.read_text()
    assert LaunchConfig.from_yaml(settings).env == {"MY_FLAG": "1"}
    given = {name: value for name, value in ENV.items() if name != "DB_PASS"}
    command = [sys.executable, str(written.script)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "set the variable DB_PASS before you start this script: its value is a secret",
    )


def test_what_a_notebook_shows_of_options_has_no_secret() -> None:
    config = LaunchConfig(num_processes=1, devices="cpu", env={**ENV, "MY_FLAG": "other"})
    assert "'MY_FLAG': 'other'" in repr(config)
    code = ConfigPanel(work, config=config).code
    assert '"PGPASSWORD": os.environ["PGPASSWORD"]' in code
    assert "import os\n" in code
    wrong = ({"DB_PASS": SECRET.encode()}, [("DB_PASS", SECRET)], f"DB_PASS={SECRET}", {"DB_PASS": f"{SECRET}\0"})
    messages = []
    for env in wrong:
        with pytest.raises(ConfigError) as caught:
            LaunchConfig(env=env)  # type: ignore[arg-type]
        messages.append(str(caught.value))
    assert SECRET not in " ".join([repr(config), code, *messages])


def test_report_of_this_machine_has_no_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_MIRROR", f"https://me:{SECRET}@mirror/torch")
    monkeypatch.setenv("NCCL_NOTE", TOKEN)
    assert main(["env", "--json", "--no-launch"]) in (0, 1)
    report = capsys.readouterr().out
    assert "TORCH_MIRROR=https://me:***@mirror/torch" in report
    assert SECRET not in report
