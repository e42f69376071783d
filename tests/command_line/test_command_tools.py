"""`notebook-launcher runs`, `config` and `estimate-memory`, as processes and by their words."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import SSH, CallOrderError, LaunchConfig, Session, notebook_launch, report, runs
from notebook_launcher.command_line import estimate_command
from notebook_launcher.command_line.program import main
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.history.run_folders import VARIABLE as RUNS
from tests.support.programs import end, read_until, type_command, type_in_terminal
from tests.support.toy_runs import make_run

if TYPE_CHECKING:
    from pathlib import Path

MODEL = """
import torch
class Small(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = torch.nn.Linear(width, 1000, bias=False)
        self.frozen = torch.nn.Linear(10, 1)
        self.frozen.requires_grad_(False)
class Nothing: pass
"""


@pytest.fixture
def some_runs(home: Path) -> Path:
    make_run(home, 1, state="failed", error="ValueError: boom", size=3000, num_processes=2)
    make_run(home, 2, ranks=[{"rank": 0, "state": "returned", "metrics": {"loss": 0.25}}])
    make_run(home, 3, name="evaluate", started=time.time())
    return home


def test_runs_command_lists_and_deletes(some_runs, tmp_path, monkeypatch, capsys):
    unanswered = type_command("runs", "delete", "--state", "failed", cwd=tmp_path, env={RUNS: str(some_runs)}, text="")
    assert unanswered.returncode == 2
    assert unanswered.stdout.startswith(f"1 run in {some_runs}\n")
    assert "nothing is deleted: the input has ended before an answer. Pass --yes" in unanswered.stderr
    assert "Traceback" not in unanswered.stderr
    asked = []

    def answer(question: str) -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    assert main(["runs", "delete", "--state", "failed"]) == 0
    assert asked[0].startswith("Delete 1 run, 3.")
    assert "deleted 1 run, 3." in capsys.readouterr().out
    assert len(runs(some_runs)) == 2


@pytest.fixture
def in_terminal(monkeypatch, capsys):
    """A function that returns the lines of a command in a terminal of this width, or in a pipe."""

    def lines(*words: str, width: int | None) -> list[str]:
        with monkeypatch.context() as patched:
            patched.setenv("COLUMNS", str(width))
            patched.setattr(sys.stdout, "isatty", lambda: width is not None)
            assert main(list(words)) == 0
        shown: str = capsys.readouterr().out
        return shown.splitlines()

    return lines


def test_table_of_runs_fits_the_terminal(some_runs, in_terminal):
    make_run(some_runs, 4, name="a name of many words " * 3, ranks=[{"rank": 0, "metrics": {"validation loss": 0.5}}])
    for width in (200, 80, 40):
        head, *rows = in_terminal("runs", width=width)[1:]
        assert len(rows) == 4
        assert max(map(len, [head, *rows])) <= width
        assert all(row.startswith("20261121-") for row in rows)
        assert ("disk" in head) == (width == 200)
        assert ("state" in head) == (width > 40)
    piped = "\n".join(in_terminal("runs", width=None))
    assert "validation loss 0.5" in piped
    assert "a name of many words a name of many wor" in piped


def test_one_run_and_a_comparison_fit_the_terminal(home, in_terminal):
    def fit(learning_rate, comment):
        for step in range(3):
            report(step=step, **{"a metric with a name of many words/validation loss": learning_rate * step})
        print("a last line of many words " * 3)
        return "a value of many words " * 3

    for learning_rate in (0.1, 0.2):
        comment = f"a text of many words for {learning_rate} " * 3
        notebook_launch(fit, 1, args=(learning_rate, comment), name="a name of many words " * 3, output="none")
    ids = [run.id for run in runs(home)]
    for width in (200, 80, 60):
        shown = in_terminal("runs", "show", "last", width=width)
        first = next(at for at, line in enumerate(shown) if line.startswith("rank "))
        tables = shown[first : shown.index(f"folder: {home}/{ids[0]}")]
        assert len(tables) == 6
        assert max(map(len, tables)) <= width
        assert "last line" in tables[0] or width < 200
        compared = in_terminal("runs", "compare", *ids, width=width)
        assert compared[0] == "2 runs compared"
        assert max(map(len, compared)) <= width
        assert ("started" in compared[1]) == (width == 200)
        assert any(line.startswith("arguments.learning_rate") for line in compared)


def test_all_runs_are_listed_on_request(home, in_terminal):
    for number in range(1, 41):
        make_run(home, number)
    assert in_terminal("runs", width=None)[-1] == "and 24 older: --limit 40"
    assert len(in_terminal("runs", "list", "--limit", "40", width=None)) == 1 + 1 + 40


def test_runs_list_separates_and_omits_session_calls_and_cells(home, capsys):
    def see(rank_number: int = 0) -> None:
        report(step=rank_number, loss=1.0)

    with Session(1, devices="cpu", output="none") as session:
        session.run(see)
        session.execute("import time\nfrom notebook_launcher import report\nreport(step=1, loss=2)\ntime.sleep(1.1)")
    notebook_launch(see, 1, devices="cpu", output="none")
    assert [run.snapshot().kind for run in runs(home)] == ["run", "cell", "call"]
    assert [run.snapshot().kind for run in runs(home).filter(kind="run")] == ["run"]
    assert runs(home).as_text().splitlines()[1].split()[:3] == ["id", "kind", "name"]
    assert "kind" not in runs(home).filter(kind="run").as_text()
    assert main(["runs", "list", "--kind", "run"]) == 0
    assert capsys.readouterr().out.startswith("1 run in")
    assert main(["runs", "list", "--kind", "cells"]) == 2
    assert "--kind cells: Did you mean cell or call? It can be run, call, cell, session." in capsys.readouterr().err
    with pytest.raises(ConfigError, match="kind='cells' is unknown"):
        runs(home).filter(kind="cells")  # type: ignore[arg-type]


def test_runs_are_filtered_by_name_state_and_age(some_runs, capsys):
    def listed(*words: str) -> list[str]:
        assert main(["runs", "list", *words]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]

    assert listed("--name", "EVAL") == ["20261121-000003-train-000003"]
    assert listed("--state", "failed") == ["20261121-000001-train-000001"]
    assert listed("--days", "1") == ["20261121-000003-train-000003"]
    assert listed("--limit", "1") == ["20261121-000003-train-000003", "and"]
    assert main(["runs", "list", "--state", "lost"]) == 0
    assert capsys.readouterr().out == f"no runs in {some_runs}\n"


def test_one_run_is_shown_with_its_folder_and_output(some_runs, capsys):
    assert main(["runs", "show", "20261121-000001", "--logs", "0"]) == 0
    shown = capsys.readouterr().out
    assert "ValueError: boom" in shown
    assert f"folder: {some_runs}/20261121-000001-train-000001\n" in shown
    assert shown.endswith("rank 0:\n" + "x" * 3000 + "\n")
    assert main(["runs", "show", "last"]) == 0
    assert "evaluate" in capsys.readouterr().out
    assert main(["runs", "compare", "20261121-000001", "last"]) == 0
    assert capsys.readouterr().out.startswith("2 runs compared\n")


def test_show_leaves_out_options_with_their_default(home, capsys):
    make_run(home, 1, config={"num_processes": 2, "max_restarts": 0, "tags": []}, arguments={"lr": "0.1"})
    assert main(["runs", "show", "last"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\narguments.lr: 0.1\nnum_processes: 2\n2 options with the default: --all lists them too\n")
    assert main(["runs", "show", "last", "--all"]) == 0
    assert capsys.readouterr().out.endswith("\nnum_processes: 2\nmax_restarts: 0\ntags: []\n")


def test_words_of_runs_that_cannot_work_are_refused(some_runs, tmp_path, capsys):
    for words, message in [
        (["show", "2026"], "3 runs in"),
        (["show", "20261121-000001", "--logs", "7"], "--logs: there is no rank 7: this run has 2 ranks, 0 to 1."),
        (["show", "last", "--folder", str(tmp_path / "none")], "A launch of more than a second leaves one, and"),
        (["delete"], "name the runs to delete, or choose them with --name, --tag, --state, --kind or --days."),
        (["list", "--state", "runing"], "--state runing: Did you mean running? It can be starting, running,"),
        (["--state", "done"], "unknown option --state. It belongs behind a command: `notebook-launcher runs list --st"),
        (["shwo"], "there is no command 'shwo'. Did you mean show?"),
        (["show", "zzz"], "The latest is 20261121-000003-train-000003. runs(), in a terminal `notebook-launcher runs`"),
        (["show", "trian"], "Did you mean 20261121-000003-train-000003?"),
        (["compare", "last"], "compare last: it takes two runs or more. `notebook-launcher runs show last` shows one"),
    ]:
        assert main(["runs", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["runs", "delete", "--state", "lost", "--yes"]) == 1
    assert main(["runs", "delete", "--days", "1", "--yes"]) == 0
    assert [run.name for run in runs()] == ["evaluate"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], ": COMMAND is missing (one of launch, config, env, runs, "),
        (["lanch", "x.py"], ": there is no command 'lanch'. Did you mean launch?"),
        (["train.py"], ": there is no command 'train.py'. To run a script: notebook-launcher launch train.py."),
        (["--cpu", "x.py"], ": unknown option --cpu. It belongs behind a command: `notebook-launcher launch --cpu`."),
        (["verify", "2"], " verify: '2' is one word too many: type `notebook-launcher verify [OPTIONS]`."),
        (["verify", "--steps", "1", "two"], " verify: --steps two: type a whole number, 1 or more."),
        (["verify", "--steps", "3"], "gradient_accumulation_steps=[3]: no combination divides the 8 samples."),
        (["attach", "zzz"], " attach: there is no run 'zzz' in"),
        (["attach", "last"], " attach: there is no detached run in"),
    ],
)
def test_words_that_mean_nothing_are_answered_with_what_to_type(some_runs, words, message, capsys):
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("notebook-launcher")
    assert message in shown
    assert shown.count("\n") == 1


def test_run_that_is_not_over_is_not_deleted(home):
    make_run(home, 1, state="running", kernel=run_folders.identify())
    (run,) = runs(home)
    with pytest.raises(CallOrderError, match=r"is running, so its folder cannot be deleted\. Stop it first\."):
        run.delete()
    assert runs(home).delete() == 0
    assert run.folder.exists()


def test_config_asks_in_plain_lines_where_there_is_no_terminal(tmp_path):
    answers = "two 2 4 bf16 yes ssh,gpu1 cpu gloo spawn - - 7 0.5 - - - 1 checkpoint yes"
    text = answers.replace(" ", "\n").replace("-", "").replace(",", " ") + 20 * "\n"
    done = type_command("config", "--config_file", "s.yaml", cwd=tmp_path, text=text)
    assert done.returncode == 0, done.stderr
    assert "Enter a whole number, 1 or more." in done.stdout
    expected = LaunchConfig(
        num_processes=2, gradient_accumulation_steps=4, mixed_precision="bf16", engine=SSH(["gpu1"]), devices="cpu",
        backend="gloo", start_method="spawn", seed=7, max_grad_norm=0.5, max_restarts=1, resume="checkpoint",
        check_collectives=True,
    )  # fmt: skip
    assert LaunchConfig.from_yaml(tmp_path / "s.yaml") == expected


def test_config_keeps_answers_and_reports_when_the_input_ends(tmp_path, monkeypatch, capsys):
    path = tmp_path / "s.yaml"
    LaunchConfig(num_processes=3, mixed_precision="bf16", devices="cpu").to_yaml(path)
    answers = iter(["", "", "fp8", "fp16", "no"])
    asked = []

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    assert main(["config", "--config_file", str(path)]) == 0
    assert LaunchConfig.from_yaml(path) == LaunchConfig(num_processes=3, mixed_precision="fp16", devices="cpu")
    assert asked[0] == "Processes (3): "
    assert "Type one of from the environment, no, fp16, bf16." in capsys.readouterr().out
    assert main(["config", "--default", "--config_file", str(tmp_path / "d.yaml")]) == 0
    assert LaunchConfig.from_yaml(tmp_path / "d.yaml") == LaunchConfig()
    assert main(["config", "--config_file", str(tmp_path / "d.json")]) == 2

    def end(_question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["config", "--config_file", str(path)]) == 2
    assert "the input ended at 'Processes'. Type the answers, or use --default." in capsys.readouterr().err


def test_config_in_a_terminal_has_menus_with_arrow_keys(tmp_path):
    pid, terminal = type_in_terminal("config", "--config_file", "s.yaml", cwd=tmp_path, env={"TERM": "xterm"})
    shown = read_until(terminal, b"on fewer cores): ")
    os.write(terminal, b"2\r")
    shown += read_until(terminal, b"steps (1): ")
    os.write(terminal, b"\r")
    shown += read_until(terminal, b"bf16")
    os.write(terminal, b"\x1b[B\x1b[B\r")  # Two rows down: fp16.
    shown += read_until(terminal, b"yes")
    os.write(terminal, b"\r")
    shown += read_until(terminal, b"written: ")
    assert end(pid, terminal) == 0, shown.decode()
    assert LaunchConfig.from_yaml(tmp_path / "s.yaml") == LaunchConfig(num_processes=2, mixed_precision="fp16")


def test_estimate_counts_weights_gradients_and_states(tmp_path, monkeypatch, capsys):
    (tmp_path / "models_to_count.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["models_to_count:Small", "--args", '{"width": 8}', "-n", "4", "--optimizer", "adamw"]
    assert main(["estimate-memory", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Small: 8,011 parameters, 8,000 of them trained; the largest module is inner with 8,000"
    (whole,) = [line for line in lines if line.startswith("float32") and "DDP" in line]
    assert [part.strip() for part in whole.split("  ") if part.strip()][2:] == ["32 kB", "32 kB", "64 kB", "128 kB"]
    (parts,) = [line for line in lines if line.startswith("bfloat16") and "FSDP" in line]
    assert [part.strip() for part in parts.split("  ") if part.strip()][2:] == ["4.01 kB", "4 kB", "8 kB", "16 kB"]


def test_estimate_reads_configurations_without_a_download(tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 1, '
        '"vocab_size": 10, "n_positions": 4}'
    )
    assert main(["estimate-memory", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("GPT2LMHeadModel: ")
    assert main(["estimate-memory", "gpt2", "--args", '{"n_layer": 1}']) == 0
    assert capsys.readouterr().out.startswith("GPT2Model: ")
    (tmp_path / "config.json").write_text("{bad")
    assert main(["estimate-memory", str(tmp_path)]) == 2
    assert "cannot be made on the meta device: JSONDecodeError: Expecting property name" in capsys.readouterr().err


def test_class_may_be_written_with_a_dot() -> None:
    sizes = {"in_features": 1, "out_features": 2}
    for target in ("torch.nn:Linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear"):
        _, model = estimate_command.make_model(target, sizes)
        assert repr(model) == "Linear(in_features=1, out_features=2, bias=True)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["json:Missing"], "has no attribute 'Missing'. Write it as package.module:Class"),
        (["torch.nn:Linaer"], "module 'torch.nn' has no attribute 'Linaer'. Did you mean Linear"),
        (["no_module:Model"], "No module named 'no_module'"),
        (["json:JSONDecoder"], "made a JSONDecoder, which is not a torch.nn.Module."),
        (["torch.nn:Linear"], "missing 2 required positional arguments: 'in_features' and 'out_features'"),
        (["torch.nn:Linear", "--args", "{width: 1}"], "Write JSON, with names in double quotes."),
        (["no/such/model"], "Nothing is downloaded"),
    ],
)
def test_estimate_refuses_what_is_no_model(words, message, capsys):
    assert main(["estimate-memory", *words]) == 2
    assert message in capsys.readouterr().err
