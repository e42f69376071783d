"""The panel without a kernel and without a browser: fields are set, what they say is read."""

from __future__ import annotations

import ast
import enum
import functools
import re
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

import pytest
import torch
import traitlets

from notebook_launcher import ConfigError, LaunchConfig
from notebook_launcher.machine import devices
from notebook_launcher.machine.devices import GPU, Machine
from notebook_launcher.widgets import ConfigPanel
from notebook_launcher.widgets.launching import last_settings
from notebook_launcher.widgets.launching.last_settings import Settings
from notebook_launcher.widgets.launching.parameters import MISSING, parameters_of
from notebook_launcher.widgets.panel.traceback_html import ansi_to_html

if TYPE_CHECKING:
    from collections.abc import Callable

GIGABYTE = 10**9


def machine(num_cores: int = 8, num_gpus: int = 0, capability: tuple[int, int] = (9, 0)) -> Machine:
    gpus = tuple(
        GPU(index=at, name="H200", total_memory=140 * GIGABYTE, free_memory=20 * GIGABYTE, capability=capability)
        for at in range(num_gpus)
    )
    return Machine(num_cores=num_cores, gpus=gpus, torch_has_cuda=True, why_no_gpu="" if gpus else "no GPU found")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *args, **kwargs: monkeypatch.setattr(devices, "detect", lambda: machine(*args, **kwargs))


@pytest.fixture(autouse=True)
def _small_machine(on: Any) -> None:
    on(2)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the notebook's cells."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module.__dict__


class Optimizer(enum.Enum):
    ADAM = "adam"
    SGD = "sgd"


class Model:
    def __repr__(self) -> str:
        raise AssertionError("of a real model it takes long, and it is asked for at each stroke of a key")


def train(lr: float = 0.1, epochs: int = 3, batch_size: int = 32) -> float:
    return lr


def field(panel: ConfigPanel, name: str) -> Any:
    """Return the field of an option, else that of an argument."""
    return {**panel.view.argument_fields, **panel.view.fields}[name]


def type_in(panel: ConfigPanel, name: str, text: Any) -> None:
    field(panel, name).control.value = text


def note_of(panel: ConfigPanel, name: str) -> str:
    return str(field(panel, name).note.value)


def chosen(panel: ConfigPanel) -> Any:
    return panel.config.devices


def pasted(panel: ConfigPanel, names: dict[str, Any]) -> tuple[Any, dict[str, Any], LaunchConfig]:
    """Run the panel's code as a cell; return the function, its arguments and the options of its call."""
    calls: list[Any] = []

    def notebook_launch(fn, num_processes=None, *, args=(), kwargs=None, **options):
        if num_processes is not None:
            options["num_processes"] = num_processes
        calls.append((fn, {**dict(enumerate(args)), **(kwargs or {})}, LaunchConfig(**options)))

    lines = [line for line in panel.code.splitlines() if line != "from notebook_launcher import notebook_launch"]
    exec("\n".join(lines), {**names, "notebook_launch": notebook_launch})
    (call,) = calls
    return call  # type: ignore[no-any-return]


# Options.


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("num_processes", "2", 2),
        ("gradient_accumulation_steps", " 8 ", 8),
        ("max_grad_norm", "0.5", 0.5),
        ("seed", "7", 7),
        ("shard", "1", 1),
        ("timeout", "1e3", 1000.0),
        ("max_restarts", "1", 1),
        ("max_grad_norm", "None", None),
        ("num_processes", "", None),
        ("backend", 1, "gloo"),
        ("comm_hook", 2, "bf16"),
        ("idle_timeout", "60", 60.0),
        ("resume", 1, "checkpoint"),
        ("preemption_signal", 2, "SIGUSR1"),
        ("gradient_accumulation_steps", "1", 1),
        ("gradient_accumulation_steps", "", None),
        ("gradient_accumulation_steps", "1e3", 1000),
        ("num_processes", "2.0", 2),
    ],
)
def test_field_sets_its_option(name, typed, value):
    panel = ConfigPanel(train)
    type_in(panel, name, typed)
    assert panel.config == LaunchConfig(**{name: value})
    assert panel.problems == {}
    assert not panel.launch_button.disabled


def test_notes_name_the_option_that_a_restart_or_a_signal_needs():
    panel = ConfigPanel(train)
    assert "The function starts from the beginning, unless it loads" in note_of(panel, "resume")
    assert "Automatic: no signal; if restarts resume from a checkpoint" in note_of(panel, "preemption_signal")
    type_in(panel, "resume", 1)
    type_in(panel, "preemption_signal", 1)
    assert "No restarts are allowed yet" in note_of(panel, "resume")
    assert "Only for a run that outlives the kernel" in note_of(panel, "preemption_signal")
    type_in(panel, "max_restarts", "3")
    type_in(panel, "detached", True)
    assert panel.config == LaunchConfig(resume="checkpoint", preemption_signal="SIGTERM", max_restarts=3, detached=True)
    assert "without a folder loads the newest checkpoint" in note_of(panel, "resume")
    assert "Sent by a cluster before" in note_of(panel, "preemption_signal")
    type_in(panel, "preemption_signal", 0)
    assert "SIGTERM. Sent by a cluster" in note_of(panel, "preemption_signal")


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [("mixed_precision", "bf16", "bf16"), ("start_method", "spawn", "spawn"), ("output", "none", "none")],
)
def test_segment_sets_its_option(name, word, value):
    panel = ConfigPanel(train)
    buttons = field(panel, name).buttons
    buttons[word].value = True
    assert getattr(panel.config, name) == value
    assert [each for each, button in buttons.items() if button.value] == [word]
    buttons[word].value = False  # pressed again
    assert buttons[word].value
    assert getattr(panel.config, name) == value


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("num_processes", "two", "Enter a whole number, 1 or more."),
        ("num_processes", "0", "Enter a whole number, 1 or more."),
        ("num_processes", "-3", "Enter a whole number, 1 or more."),
        ("num_processes", "True", "Enter a whole number, 1 or more."),
        ("num_processes", "[2]", "Enter a whole number, 1 or more."),
        ("gradient_accumulation_steps", "1.5", "Enter a whole number, 1 or more."),
        ("gradient_accumulation_steps", "1,5", "Enter a whole number, 1 or more."),
        ("max_restarts", "None", "Enter a whole number, 0 or more."),
        ("num_processes", "1000", "Enter 64 or less: this machine has 2 CPU cores."),
        ("shard", "0", "Enter a whole number, 1 or more."),
        ("shard", "3", "2 / 3 is not a whole number of replicas. It can be 1, 2"),
        ("seed", "-1", "Enter a whole number, 0 to 4,294,967,295."),
        ("seed", "4294967296", "Enter a whole number, 0 to 4,294,967,295."),
        ("timeout", "inf", "Enter a number above 0."),
        ("timeout", "nan", "Enter a number above 0."),
        ("timeout", "0", "Enter a number above 0."),
        ("max_grad_norm", "x", "Enter a number above 0."),
        ("backend", 2, "Choose auto or gloo: nccl needs a GPU for each process (no GPU found)."),
    ],
)
def test_invalid_value_is_noted_at_its_field_and_disables_launch(name, typed, message):
    panel = ConfigPanel(train)
    type_in(panel, name, typed)
    assert message in note_of(panel, name)
    assert list(panel.problems) == [name]
    assert panel.launch_button.disabled
    reason = f"Fix {field(panel, name).label} to enable Launch."
    assert reason in panel._running.status.value
    assert panel.launch_button.tooltip == reason
    panel.launch_button.click()
    assert panel.run is None
    type_in(panel, name, 0 if name == "backend" else "")
    assert panel.problems == {}
    assert not panel.launch_button.disabled
    assert "nbp-error" not in note_of(panel, name)


def test_mistake_in_one_field_survives_typing_in_another():
    panel = ConfigPanel(train)
    type_in(panel, "seed", "abc")
    type_in(panel, "num_processes", "2")
    assert field(panel, "seed").control.value == "abc"
    assert list(panel.problems) == ["seed"]
    assert panel.view.advanced.head.description == "▸ Advanced (1 to fix)"
    assert (panel.config.seed, panel.config.num_processes) == (None, 2)


def test_typed_text_stays_as_typed():
    panel = ConfigPanel(train)
    type_in(panel, "timeout", "1e3")
    type_in(panel, "seed", "3")
    assert field(panel, "timeout").control.value == "1e3"


def test_config_can_be_set_and_observed():
    panel = ConfigPanel(train, 2)
    seen: list[LaunchConfig] = []
    panel.observe(lambda change: seen.append(change["new"]), "config")
    type_in(panel, "seed", "abc")
    panel.config = LaunchConfig(num_processes=1, timeout=60, env={"A": "b"}, mixed_precision="bf16", seed=5)
    assert [field(panel, name).control.value for name in ("num_processes", "timeout", "seed")] == ["1", "60", "5"]
    assert field(panel, "mixed_precision").buttons["bf16"].value
    assert panel.problems == {}
    type_in(panel, "seed", "6")
    assert [config.seed for config in seen] == [5, 6]
    assert panel.config.env == {"A": "b"}


def test_panel_takes_the_options_of_a_launch():
    assert ConfigPanel(train, 2, config=LaunchConfig(seed=1), timeout=5).config == LaunchConfig(
        num_processes=2, seed=1, timeout=5
    )
    with pytest.raises(ConfigError, match=r"unknown option num_proceses=. Did you mean num_processes="):
        ConfigPanel(train, num_proceses=2)


# The machine.


def test_too_many_processes_for_the_machine_are_refused(on):
    assert "64 at most on 2 CPU cores" in note_of(ConfigPanel(train), "num_processes")
    on(16, 4)
    panel = ConfigPanel(train)
    assert "Automatic: 4, one for each GPU; 256 at most" in note_of(panel, "num_processes")
    assert field(panel, "num_processes").control.placeholder == "4 (automatic)"


def test_without_a_gpu_the_devices_are_grey_with_the_reason():
    panel = ConfigPanel(train)
    segments = field(panel, "devices").segments.buttons
    assert [segments[word].disabled for word in ("all", "some", "CPU")] == [True, True, False]
    assert segments["CPU"].value
    assert segments["all"].tooltip == "no GPU found"
    assert "No GPU found" in note_of(panel, "devices")
    panel.config = LaunchConfig(devices=[0])  # type: ignore[arg-type]
    assert "Choose CPU: no GPU found." in note_of(panel, "devices")
    segments["CPU"].value = True
    assert panel.config.devices == "cpu"
    assert panel.problems == {}


def test_gpus_are_picked_by_name_and_memory(on):
    on(16, 3)
    panel = ConfigPanel(train)
    picker = field(panel, "devices")
    assert [box.description for box in picker.boxes][1] == "1: H200, 20 GB free, 120 GB used"
    assert picker.segments.buttons["all"].value
    picker.segments.buttons["some"].value = True
    assert chosen(panel) == (0, 1, 2)
    picker.boxes[1].value = False
    assert chosen(panel) == (0, 2)
    assert field(panel, "num_processes").control.placeholder == "2 (automatic)"
    picker.boxes[0].value = picker.boxes[2].value = False
    assert "Tick a GPU, or choose CPU." in note_of(panel, "devices")
    picker.segments.buttons["CPU"].value = True
    assert chosen(panel) == "cpu"
    assert [box.value for box in picker.boxes] == [False] * 3
    assert panel.problems == {}


def test_free_memory_of_gpus_can_be_read_again(on, monkeypatch):
    on(16, 1)
    panel = ConfigPanel(train)
    fresh = GPU(index=0, name="H200", total_memory=140 * GIGABYTE, free_memory=140 * GIGABYTE)
    monkeypatch.setattr(
        devices, "detect", lambda: Machine(num_cores=1, gpus=(fresh,), torch_has_cuda=True, why_no_gpu="")
    )
    field(panel, "devices").refresh.click()
    assert field(panel, "devices").boxes[0].description == "0: H200, 140 GB free, 0 bytes used"


@pytest.mark.parametrize(
    ("on_machine", "grey", "reason"),
    [
        ((2, 0), ["fp16"], "fp16 needs a GPU"),
        ((8, 1, (9, 0)), [], ""),
        ((8, 1, (7, 5)), ["bf16"], "bf16 needs compute capability 8.0; H200 has 7.5."),
        ((8, 1, (5, 2)), ["fp16", "bf16"], "fp16 needs compute capability 5.3"),
    ],
)
def test_unsupported_precisions_are_grey(on, on_machine, grey, reason):
    on(*on_machine)
    panel = ConfigPanel(train)
    buttons = field(panel, "mixed_precision").buttons
    assert [word for word, button in buttons.items() if button.disabled] == grey
    assert reason in note_of(panel, "mixed_precision")
    if grey:
        panel.config = LaunchConfig(mixed_precision=grey[0])
        assert "Note: " in note_of(panel, "mixed_precision")
        assert panel.problems == {}  # It runs, if slowly; who says so in code is not stopped.


def test_refusal_of_the_machine_is_noted_at_its_field(on):
    on(16, 2)
    panel = ConfigPanel(train, 4, backend="nccl")
    assert "Enter 2 or less, or choose gloo as backend: nccl needs a GPU for each process." in note_of(
        panel, "num_processes"
    )
    assert panel.launch_button.disabled


def test_backends_that_need_a_gpu_show_the_reason():
    words = [word for word, _ in field(ConfigPanel(train), "backend").control.options]
    assert "nccl (no GPU found)" in words


# The function's parameters.


@pytest.mark.parametrize(
    ("annotation", "default", "kind", "optional"),
    [
        (int, 3, "int", False),
        (float, 1, "float", False),
        ("float", 0.1, "float", False),
        ("int | None", None, "int", True),
        (Union[str, None], None, "str", True),  # noqa: UP007 - as older code says it
        (bool, True, "bool", False),
        (bool, MISSING, "choice", False),
        (Literal["a", "b"], "a", "choice", False),
        ("Literal[1, 2]", 1, "choice", False),
        (Optimizer, Optimizer.SGD, "choice", False),
        ("Optimizer", MISSING, "choice", False),
        (MISSING, 3, "int", False),
        (MISSING, 0.5, "float", False),
        (MISSING, True, "bool", False),
        (MISSING, "a", "str", False),
        (MISSING, Optimizer.ADAM, "choice", False),
        (MISSING, (1, 2), "literal", False),
        (MISSING, None, "literal", True),
        (MISSING, MISSING, "literal", False),
        (list[int], MISSING, "literal", False),
        ("dict[str, int] | None", None, "literal", True),
        (int | str, 1, "literal", False),
        ("Unheard", MISSING, "literal", False),
        (Model, MISSING, "code", False),
        (MISSING, Model(), "code", False),
        ("Model | None", None, "code", True),
        ([1], MISSING, "code", False),
        (float, float("nan"), "float", False),
        (MISSING, print, "code", False),
    ],
)
def test_kind_of_a_parameter_follows_annotation_and_default(annotation, default, kind, optional):
    def function(x=default):
        pass

    function.__annotations__["x"] = annotation
    if default is MISSING:
        function.__defaults__ = None
    if annotation is MISSING:
        del function.__annotations__["x"]
    (parameter,) = parameters_of(function)
    assert (parameter.kind, parameter.optional) == (kind, optional)
    assert parameter.fits(default) is (kind != "code" or default in (MISSING, None))


def test_every_sort_of_callable_has_its_parameters():
    class Trainer:
        def fit(self, lr: float = 0.1):
            pass

        def __call__(self, steps: int = 1):
            pass

    assert list(ConfigPanel(Trainer().fit).view.argument_fields) == ["lr"]
    assert list(ConfigPanel(Trainer()).view.argument_fields) == ["steps"]
    assert list(ConfigPanel(functools.partial(train, lr=0.5)).view.argument_fields) == ["lr", "epochs", "batch_size"]
    assert list(ConfigPanel(lambda *args, **kwargs: 0).view.argument_fields) == []
    assert list(ConfigPanel(sum).view.argument_fields) == ["iterable", "start"]
    assert ConfigPanel(dict).view.argument_fields == {}


def test_arguments_are_set_by_typing_and_choosing():
    def function(
        lr: float = 0.1, opt: Optimizer = Optimizer.ADAM, *, flag: bool = False, name: str | None = "x", h=(1,)
    ):
        pass

    panel = ConfigPanel(function)
    for name, value in {"lr": "1e-3", "opt": 1, "flag": True, "name": "", "h": "[2, 3]"}.items():
        type_in(panel, name, value)
    assert dict(panel.arguments) == {"lr": 0.001, "opt": Optimizer.SGD, "flag": True, "name": None, "h": [2, 3]}
    for name, value in {"lr": "0.1", "opt": 0, "flag": False, "name": "x", "h": ""}.items():
        type_in(panel, name, value)
    assert dict(panel.arguments) == {}


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("lr", "fast", "Enter a number."),
        ("epochs", "1.5", "Enter a whole number."),
        ("epochs", "True", "Enter a whole number."),
        ("sizes", "[1,", "Enter a Python literal, such as 3, &#x27;text&#x27; or [1, 2]."),
        ("sizes", "words", "Enter a Python literal, such as 3, &#x27;text&#x27; or [1, 2]."),
    ],
)
def test_typed_argument_without_a_value_is_refused(name, typed, message):
    def function(lr=0.1, epochs=3, sizes=(1, 2)):
        pass

    panel = ConfigPanel(function)
    type_in(panel, name, typed)
    assert message in note_of(panel, name)
    assert panel.launch_button.disabled
    type_in(panel, name, "")
    assert panel.problems == {}


@pytest.mark.parametrize(
    ("annotation", "right", "wrong", "words"),
    [
        (list, "[1, 'a']", "5", "Enter a literal of type list, such as [1, 2]."),
        (list[int], "[1]", "[1, 'a']", "Enter a literal of type list[int], such as [1, 2]."),
        (list[int], "[]", "[True]", "of type list[int]"),
        ("list[float] | None", "[1, 0.5]", "(1, 2)", "of type list[float]"),
        (dict[str, int], "{'a': 1}", "{1: 2}", "Enter a literal of type dict[str, int], such as {'a': 1}."),
        (dict[str, list[int]], "{'a': [1]}", "{'a': 1}", "of type dict[str, list[int]]"),
        (tuple[int, str], "(1, 'a')", "(1, 'a', 2)", "of type tuple[int, str], such as (1, 2)."),
        (tuple[int, ...], "(1, 2, 3)", "(1, 'a')", "of type tuple[int, ...]"),
        (frozenset[int], "{1}", "[1]", "of type frozenset[int]"),
        (Sequence[str], "('a',)", "'a'", "of type Sequence[str]"),
        (list[int | None], "[1, None]", "['a']", "of type list[int | None]"),
        (list[Model], "[1]", "1", "Enter a literal of type list["),  # A type of the user's is not checked.
    ],
)
def test_typed_container_has_the_type_of_the_annotation(annotation, right, wrong, words):
    def function(layers=None):
        pass

    function.__annotations__["layers"] = annotation
    (parameter,) = parameters_of(function)
    assert parameter.parse(right) == ast.literal_eval(right)
    with pytest.raises(ValueError, match=re.escape(words)):
        parameter.parse(wrong)


def test_code_that_this_machine_cannot_run_names_the_field_to_fix():
    panel = ConfigPanel(train)
    type_in(panel, "num_processes", "65")
    assert "Fix Processes to run this code on this machine." in panel.view._code.value
    assert "nbp-copy" not in panel.view._code.value
    type_in(panel, "num_processes", "2")
    assert "Fix " not in panel.view._code.value


def test_required_argument_that_cannot_be_typed_comes_from_code():
    def function(model: Model, data, *, steps: int):
        pass

    panel = ConfigPanel(function)
    assert set(panel.problems) == {"arguments.model", "arguments.data", "arguments.steps"}
    assert "Set it from code: panel.arguments[&quot;model&quot;] = ..." in note_of(panel, "model")
    panel.arguments["model"] = Model()
    panel.arguments["data"] = Model()
    assert field(panel, "data").control.placeholder == "from code: Model"
    type_in(panel, "steps", "3")
    assert panel.problems == {}
    assert "Taken from code" in note_of(panel, "model")
    assert ">Model<" in field(panel, "model").control.value
    type_in(panel, "data", "[1]")
    assert panel.arguments["data"] == [1]
    del panel.arguments["steps"]
    assert list(panel.problems) == ["arguments.steps"]
    panel.arguments = {"steps": 1}
    assert set(panel.problems) == {"arguments.model", "arguments.data"}


def test_unknown_argument_is_refused():
    panel = ConfigPanel(train)
    with pytest.raises(ConfigError, match=r"arguments\['epoch'\]: train has no parameter of that name. Did you mean"):
        panel.arguments["epoch"] = 3
    with pytest.raises(ConfigError, match=r"arguments\['x'\]: train .* It takes lr, epochs, batch_size."):
        ConfigPanel(train, kwargs={"x": 3})
    with pytest.raises(ConfigError, match=r"arguments\['x'\]: nothing has no parameter .* It takes none"):
        ConfigPanel(kwargs={"x": 3})
    anything = ConfigPanel(lambda **kwargs: 0, kwargs={"x": 3})
    assert dict(anything.arguments) == {"x": 3}


@pytest.mark.parametrize(
    ("annotation", "default", "typed", "value", "note"),
    [
        (MISSING, None, "data/train.csv", "data/train.csv", "Read as the text &quot;data/train.csv&quot;."),
        (MISSING, None, '"3"', "3", ""),
        (MISSING, None, "3", 3, "Read as a number. Write &quot;3&quot; for a text."),
        (MISSING, None, "[1, 2]", [1, 2], ""),
        (MISSING, None, "true", "true", "Write True for the truth value."),
        (MISSING, None, "True", True, ""),
        (MISSING, None, "None", None, ""),
        ("int | str", 1, "auto", "auto", "Read as the text &quot;auto&quot;."),
        ("str | None", None, "None", "None", "Read as the text &quot;None&quot;. Empty the field for None."),
        ("str", "x", "'y'", "'y'", "The quotes are read as part of the text. Leave them out."),
        ("str | Path", "x", "y", "y", ""),
        ("Path | None", None, "a b/c", Path("a b/c"), ""),
        (MISSING, Path("x"), "y", Path("y"), ""),
    ],
)
def test_bare_words_are_read_as_text_where_a_text_may_be_meant(annotation, default, typed, value, note):
    def function(path=default):
        pass

    if annotation is not MISSING:
        function.__annotations__["path"] = annotation
    panel = ConfigPanel(function)
    type_in(panel, "path", typed)
    assert panel.problems == {}
    assert panel._state.value_of("path") == value
    assert note in note_of(panel, "path")
    assert bool(note) or "Read" not in note_of(panel, "path")


@pytest.mark.parametrize("typed", ["[1", "{'a'", "'data", '"data', "(1,"])
def test_broken_literal_is_not_read_as_a_text(typed):
    panel = ConfigPanel(lambda path=None: 0)
    type_in(panel, "path", typed)
    assert "Enter a Python literal, such as 3" in note_of(panel, "path")


@pytest.mark.parametrize(
    ("default", "annotation", "value", "note"),
    [
        (0.1, "float", 0.1, "Empty means 0.1."),
        (3, "int | None", None, "Empty means None."),
        ("x", "str", "", "Empty means &quot;&quot;."),
        ("x", "str | None", None, "Empty means None."),
        ((1, 2), "tuple", (1, 2), "Empty means (1, 2)."),
    ],
)
def test_emptied_field_names_the_value_that_it_means(default, annotation, value, note):
    def function(x=default):
        pass

    function.__annotations__["x"] = annotation
    panel = ConfigPanel(function)
    assert "Empty" not in note_of(panel, "x")
    type_in(panel, "x", "7" if annotation != "tuple" else "(7,)")
    type_in(panel, "x", "")
    assert field(panel, "x").control.value == ""
    assert panel._state.value_of("x") == value
    assert note in note_of(panel, "x")


def test_emptied_option_names_the_value_that_it_means():
    panel = ConfigPanel(train, 2, seed=3)
    type_in(panel, "num_processes", "")
    type_in(panel, "seed", "")
    assert "Empty means 2 (automatic). 64 at most" in note_of(panel, "num_processes")
    assert "Empty means a random seed, which is recorded." in note_of(panel, "seed")


def test_list_of_choices_shows_the_value_that_is_set():
    def function(opt: Literal["a", "b"] = "other", n: Literal[1, "1"] = 1, kind: Optimizer = "adam"):  # type: ignore[assignment]
        pass

    panel = ConfigPanel(function)
    assert [word for word, _ in field(panel, "opt").control.options] == ["other", "a", "b"]
    assert [word for word, _ in field(panel, "n").control.options] == ["1", "'1'"]
    assert [word for word, _ in field(panel, "kind").control.options] == ["adam", "ADAM", "SGD"]
    panel.arguments["opt"] = "new"
    control = field(panel, "opt").control
    assert dict(control.options)["from code: 'new'"] == control.value
    control.value = 1
    assert panel.arguments["opt"] == "a"
    assert "from code" not in str(control.options)


def test_code_is_withheld_from_the_clipboard_while_a_field_is_wrong():
    panel = ConfigPanel(train, 2, seed=7)
    assert "Copy" in panel.view._code.value
    type_in(panel, "seed", "7x")
    type_in(panel, "lr", "fast")
    assert "Fix Seed and lr to bring this code up to date." in panel.view._code.value
    assert "Copy" not in panel.view._code.value
    required = ConfigPanel(lambda data: 0)
    assert "Fix data to bring this code up to date." in required.view._code.value


def test_code_of_a_panel_without_a_name_asks_for_one(names):
    panel = ConfigPanel(lambda model=None: 0, kwargs={"model": Model()})
    assert "Give the panel a name first: panel = ConfigPanel(...)" in panel.view._code.value
    names["mine"] = panel
    panel.view.draw()
    assert "Give the panel a name" not in panel.view._code.value
    assert "mine.fn" in panel.code


def test_panel_reports_that_its_function_was_defined_again(names):
    exec("def loop(): pass", names)
    first = names["loop"]
    panel = names["panel"] = ConfigPanel(first, 2)
    assert panel.code.endswith("notebook_launch(loop, 2)")
    exec("def loop(): return 1", names)
    panel.view.draw()
    assert panel.code.endswith("notebook_launch(panel.fn, 2)")
    assert "loop was defined again: run this cell again to launch the new version." in panel._running.status.value


def test_disabled_stop_button_reports_that_there_is_no_run():
    assert ConfigPanel(train).stop_button.tooltip == "There is no run to stop."


def test_function_that_cannot_be_launched_disables_launch():
    async def function():
        pass

    panel = ConfigPanel(function)
    assert "is a coroutine function" in panel.problems[""]
    assert panel.launch_button.disabled
    assert "make the panel with ConfigPanel(train)" in ConfigPanel().problems[""]


# What it comes to.


def test_effective_batch_is_a_formula():
    panel = ConfigPanel(train, 2)
    type_in(panel, "batch_size", "16")
    type_in(panel, "gradient_accumulation_steps", "4")
    assert panel.effective_batch == 128
    assert str(panel._state.effective_batch) == "micro-batch 16 × accumulation 4 × processes 2 = 128"  # noqa: RUF001
    assert "<b>128</b> samples per update" in panel.view._formula.value
    type_in(panel, "gradient_accumulation_steps", "x")
    assert panel.effective_batch is None
    assert "<b>?</b> samples per update" in panel.view._formula.value


def test_panel_shows_the_steps_and_the_precision_that_the_environment_gives(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    panel = ConfigPanel(train, 2)
    assert str(panel._state.effective_batch) == "micro-batch 32 × accumulation 4 × processes 2 = 256"  # noqa: RUF001
    steps, precision = field(panel, "gradient_accumulation_steps"), field(panel, "mixed_precision")
    assert steps.control.placeholder == "4 (ACCELERATE_GRADIENT_ACCUMULATION_STEPS)"
    assert [word for word, button in precision.buttons.items() if button.value] == ["bf16"]
    assert "steps" not in panel.code
    type_in(panel, "gradient_accumulation_steps", "1")
    precision.buttons["no"].value = True
    assert panel.effective_batch == 64
    assert panel.code.endswith('notebook_launch(train, 2, mixed_precision="no", gradient_accumulation_steps=1)')
    panel.config = LaunchConfig(num_processes=2, env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"})
    assert panel.effective_batch is None
    assert steps.control.placeholder == "? (ACCELERATE_GRADIENT_ACCUMULATION_STEPS)"


@pytest.mark.parametrize("size", [0, -8])
def test_micro_batch_must_be_at_least_one_sample(size):
    panel = ConfigPanel(train, 2)
    type_in(panel, "batch_size", str(size))
    assert "Enter a whole number, 1 or more." in note_of(panel, "batch_size")
    assert (panel.effective_batch, panel.launch_button.disabled) == (None, True)
    own_meaning = ConfigPanel(lambda batch_size=-1: 0, 2)
    assert (own_meaning.effective_batch, own_meaning.problems) == (None, {})


@pytest.mark.parametrize("name", ["micro_batch_size", "per_device_train_batch_size", "train_batch_size", "batch_size"])
def test_micro_batch_is_the_functions_own_parameter(name):
    namespace: dict[str, Any] = {}
    exec(f"def function({name}: int = 8): pass", namespace)
    panel = ConfigPanel(namespace["function"], 2)
    assert field(panel, name).label == "Micro-batch size"
    assert panel.effective_batch == 16


def test_function_without_a_micro_batch_size_names_the_parameter_to_add():
    panel = ConfigPanel(lambda lr=0.1: lr, 2, gradient_accumulation_steps=4)
    control, note = panel.view.children[2].children[1].children
    assert control.disabled
    assert "has no parameter for the micro-batch size. Add a parameter named batch_size" in note.value
    assert "<b>8</b> micro-batches per update" in panel.view._formula.value
    assert panel.effective_batch is None


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        ({"num_processes": 2, "gradient_accumulation_steps": 4}, {"lr": 0.02, "epochs": 3}),
        ({"devices": "cpu", "backend": None, "env": {"A": 'b"\n'}, "seed": 3}, {"name": "it's", "sizes": [1, (2,)]}),
        ({"timeout": 0.5, "output": "none", "start_method": "spawn", "max_grad_norm": 1, "max_restarts": 2}, {}),
        ({"num_processes": 2}, {"name": "x" * 60, "sizes": list(range(20)), "lr": 1e-9}),
        ({}, {"mode": Optimizer.SGD, "lr": float("inf")}),
    ],
)
def test_code_of_the_panel_makes_the_same_launch(names, options, arguments):
    def function(lr=0.1, epochs=1, name="", sizes=(), mode=Optimizer.ADAM):
        pass

    panel = ConfigPanel(function, kwargs=arguments, **options)
    names.update(train=function, panel=panel, Optimizer=Optimizer)
    assert pasted(panel, names) == (function, arguments, LaunchConfig(**options))
    assert max(map(len, panel.code.splitlines())) <= 120


def test_code_holds_only_options_that_differ_from_defaults(names):
    names.update(train=train)
    panel = ConfigPanel(train, 4, kwargs={"epochs": 5, "lr": 0.1}, mixed_precision="bf16")
    assert panel.code.splitlines()[-1] == 'notebook_launch(train, 4, kwargs={"epochs": 5}, mixed_precision="bf16")'


def test_code_names_objects_without_a_literal(names):
    model, nameless = Model(), Model()
    panel = ConfigPanel(lambda model, other: 0, kwargs={"model": model, "other": nameless})
    names.update(my_model=model, my_panel=panel)
    code = panel.code.splitlines()[-1]
    assert code == 'notebook_launch(my_panel.fn, kwargs={"model": my_model, "other": my_panel.arguments["other"]})'
    assert pasted(panel, names)[1] == {"model": model, "other": nameless}


def test_code_names_methods_by_their_objects(names):
    class Trainer:
        def fit(self, lr: float = 0.1):
            pass

        @classmethod
        def make(cls, size: int = 2):
            pass

        def __call__(self, steps: int = 1):
            pass

    trainer = Trainer()
    names.update(trainer=trainer, Trainer=Trainer)
    for function, name in ((trainer.fit, "trainer.fit"), (Trainer.make, "Trainer.make"), (trainer, "trainer")):
        panel = ConfigPanel(function, 2)
        assert panel.code.splitlines()[-1] == f"notebook_launch({name}, 2)"
        assert pasted(panel, names)[0] == function


def test_code_of_a_partial_is_a_call_of_it(names):
    names.update(tuned=functools.partial(train, lr=0.5))
    panel = ConfigPanel(names["tuned"], 2, kwargs={"epochs": 9})
    assert panel.code.splitlines()[-1] == 'notebook_launch(tuned, 2, kwargs={"epochs": 9})'
    assert field(panel, "lr").control.placeholder == "0.5"
    names.update(panel=ConfigPanel(functools.partial(train, lr=0.5)))
    assert names["panel"].code.splitlines()[-1] == "notebook_launch(panel.fn)"


def test_four_essential_fields_come_first():
    panel = ConfigPanel(train)
    first = [box.children[0].description for box in panel.view.children[2].children[:3]]
    assert first == ["Processes", "Micro-batch size", "Accumulation steps"]
    assert panel.view.children[2].children[3] is field(panel, "mixed_precision").box
    assert not panel.view.advanced.is_open


def test_function_with_kwargs_takes_any_argument(names):
    def function(lr=0.1, **more):
        pass

    names.update(function=function)
    panel = ConfigPanel(function, kwargs={"depth": 3})
    panel.arguments["width"] = 4
    assert panel._state.call() == ((), {"depth": 3, "width": 4})
    assert panel.code.splitlines()[-1] == 'notebook_launch(function, kwargs={"depth": 3, "width": 4})'
    assert panel.problems == {}


def test_typing_stays_fast_with_large_arguments():
    def function(data, model, lr=0.1):
        pass

    panel = ConfigPanel(function, kwargs={"data": list(range(10**6)), "model": Model()})
    began = time.perf_counter()
    for stroke in range(10):
        type_in(panel, "lr", str(stroke))
    assert time.perf_counter() - began < 1  # Writing such a list out takes 0.1 s.


@pytest.mark.parametrize("value", [None, 3, "auto", {"num_processes": 2}, LaunchConfig])
def test_invalid_config_is_refused_and_changes_nothing(value):
    panel = ConfigPanel(train, 2)
    with pytest.raises(traitlets.TraitError, match="expected a LaunchConfig"):
        panel.config = value
    assert panel.config == LaunchConfig(num_processes=2)
    assert field(panel, "num_processes").control.value == "2"


def test_code_has_the_imports_that_the_notebook_lacks(names):
    panel = ConfigPanel(functools.reduce, kwargs={})
    assert "from functools import reduce" in panel.code or "from _functools import reduce" in panel.code
    from notebook_launcher import notebook_launch

    names.update(notebook_launch=notebook_launch, train=train)
    assert ConfigPanel(train).code == "notebook_launch(train)"


def test_positional_only_parameters_go_by_place(names):
    def function(a, b=2, /, c=3):
        pass

    panel = ConfigPanel(function, kwargs={"a": 1, "c": 4})
    names.update(f=function)
    assert panel.code.endswith('notebook_launch(f, args=(1,), kwargs={"c": 4})')
    assert panel._state.call() == ((1,), {"c": 4})
    panel.arguments["b"] = 5
    assert panel._state.call() == ((1, 5), {"c": 4})


def test_code_is_escaped_and_dimmed_while_something_is_wrong(names):
    names["f"] = lambda name="": 0
    panel = ConfigPanel(names["f"])
    type_in(panel, "name", "</code><script>")
    assert "&lt;/code&gt;&lt;script&gt;" in panel.view._code.value
    assert "<script>" not in panel.view._code.value
    assert "nbp-stale" not in panel.view._code.value
    type_in(panel, "seed", "x")
    assert "nbp-stale" in panel.view._code.value


def test_sharding_field_shows_memory_saved_and_bytes_sent(names):
    panel = ConfigPanel(train, 4)
    note = note_of(panel, "shard")
    assert "Each process has all parameters, gradients and optimizer state; enter 4 to keep 1/4 on each" in note
    type_in(panel, "shard", "4")
    type_in(panel, "gradient_accumulation_steps", "2")
    assert "1/4 of parameters, gradients and optimizer state on each process" in note_of(panel, "shard")
    # 2 micro-batches with 3 x 3/4 of the parameters each, against 2 x 3/4 of them once.
    assert "An update sends 3 times as much." in note_of(panel, "shard")
    type_in(panel, "shard", "")
    type_in(panel, "num_processes", "1")
    assert "With one process, sharding has no effect" in note_of(panel, "shard")
    type_in(panel, "gradient_accumulation_steps", "x")
    assert "With one process" not in note_of(panel, "shard")


@pytest.mark.parametrize("source", ["argument", "variable of the function"])
def test_field_that_shards_counts_a_model_that_the_call_names(source, names):
    model = torch.nn.Linear(1000, 300, bias=False)  # 1.2 MB

    def fit(net: Any = None) -> Any:
        return net if source == "argument" else model

    panel = ConfigPanel(fit, 4, kwargs={"net": model} if source == "argument" else {}, shard=2)
    assert "Each process holds 600 kB of parameters instead of 1.2 MB" in note_of(panel, "shard")
    # Over 2 processes 3 x 1/2, and over the 2 replicas 2 x 1/2 of the half; against 2 x 3/4.
    assert "An update sends 2.4 MB a process instead of 1.8 MB." in note_of(panel, "shard")


# Around it.


def test_settings_are_saved_and_loaded(tmp_path):
    path = tmp_path / "config.yaml"
    panel = ConfigPanel(train, 2, seed=7, mixed_precision="bf16", shard=2)
    panel.view.file.path.value = str(path)
    panel.view.file.save_button.click()
    assert f"accelerate launch --config_file {path}" in panel.view.file.note.value
    other = ConfigPanel(train)
    other.view.file.path.value = str(path)
    other.view.file.load_button.click()
    assert other.config == panel.config
    path.write_text("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: EAGER}\ndebug: true\n")
    other.view.file.load_button.click()
    assert "Not used here, but kept when you save: debug" in other.view.file.note.value
    path.write_text("distributed_type: MEGATRON_LM\n")
    other.view.file.load_button.click()
    assert "it splits the model with Megatron-LM" in other.view.file.note.value
    assert other.config == LaunchConfig(num_processes=1, env={"ACCELERATE_DYNAMO_BACKEND": "eager"})


def test_repr_of_a_panel_is_short():
    assert repr(ConfigPanel(train)) == "<ConfigPanel(train): not launched yet>"
    assert repr(ConfigPanel()) == "<ConfigPanel(): not launched yet>"


def test_labels_are_never_cut_off():
    panel = ConfigPanel(train)
    described = [each.control for each in panel.view.fields.values() if hasattr(each.control, "description")]
    assert described
    assert {control.style.description_width for control in described} == {"initial"}


def test_colours_of_a_terminal_become_classes():
    text = "\x1b[1;31m<b>\x1b[0m & \x1b[38;5;12mx\x1b[39;49m\x1b[2K\x07"
    assert ansi_to_html(text) == (
        '<span class="nbp-ansi-red nbp-bold">&lt;b&gt;</span> &amp; <span class="nbp-ansi-blue">x</span>'
    )


def test_there_are_no_results_before_a_run():
    panel = ConfigPanel(train)
    assert (panel.run, panel.results) == (None, None)
    panel.stop_button.click()
    assert panel.stop_button.disabled


# What is kept.


@pytest.fixture
def notebook(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notebook that Jupyter's server has named, and a place for its runs."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/a.ipynb")
    return home


def tuned(
    lr: float = 0.1, path=None, opt: Optimizer = Optimizer.ADAM, model=None, api_key: str = "", *, flag: bool = False
):
    pass


def remembered(panel: ConfigPanel) -> Settings:
    path = last_settings.file_of(panel.fn, panel.config)
    assert path is not None
    last_settings.write(path, panel.settings)
    settings = last_settings.read(path)
    assert settings is not None
    return settings


def test_settings_of_a_run_fill_the_next_panel_and_can_be_taken_back(notebook):
    panel = ConfigPanel(tuned, 2, seed=5, mixed_precision="bf16")
    for name, value in {"lr": "0.5", "path": "3 a", "opt": 1, "flag": True, "max_grad_norm": "1"}.items():
        type_in(panel, name, value)
    panel.arguments["model"] = Model()
    panel.arguments["api_key"] = "hidden"
    other = ConfigPanel(tuned, seed=6, kwargs={"lr": 0.2})
    other.view.recall(remembered(panel), "As in your last run")
    assert other.config == LaunchConfig(num_processes=2, seed=6, mixed_precision="bf16", max_grad_norm=1)
    assert dict(other.arguments) == {"lr": 0.2, "path": "3 a", "opt": Optimizer.SGD, "flag": True}
    said = other.view.recalled.note.value
    assert "As in your last run: Processes 2, Mixed precision bf16, Maximum gradient norm 1.0, path" in said
    assert "lr" not in said
    other.view.recalled.button.click()
    assert other.config == LaunchConfig(seed=6)
    assert dict(other.arguments) == {"lr": 0.2}
    assert other.view.recalled.box.layout.display == "none"


def test_settings_that_the_function_no_longer_takes_are_left_out(notebook):
    settings = Settings(
        {"num_processes": "many", "seed": -1, "env": {"A": "b"}, "output": "none"},
        {"lr": "fast", "gone": "1", "opt": "gone", "flag": "x", "path": 3},
    )
    panel = ConfigPanel(tuned)
    panel.view.recall(settings, "As in your last run")
    assert panel.config == LaunchConfig(output="none")
    assert dict(panel.arguments) == {}


def test_no_settings_are_kept_without_recording_or_a_known_notebook(notebook, monkeypatch):
    file = last_settings.file_of(tuned, LaunchConfig())
    assert file is not None
    assert file.parent == notebook / "panels"
    assert file != last_settings.file_of(train, LaunchConfig())
    assert last_settings.file_of(tuned, LaunchConfig(runs_folder=None)) is None
    assert last_settings.file_of(None, LaunchConfig()) is None
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/b.ipynb")
    assert file != last_settings.file_of(tuned, LaunchConfig())
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert last_settings.file_of(tuned, LaunchConfig()) is None
    file.parent.mkdir(parents=True)
    for text in ("", "[]", '{"options": 3}'):
        file.write_text(text)
        assert last_settings.read(file) is None


def test_picture_of_a_panel_holds_its_values_and_its_code(names):
    names["train"] = train
    panel = ConfigPanel(train, 2, seed=3)
    type_in(panel, "lr", "0.5")
    rows = panel.view.words()
    assert rows == {
        "Processes": "2",
        "Accumulation steps": "1",
        "Mixed precision": "no",
        "Seed": "3",
        "lr": "0.5",
        "epochs": "3",
        "Micro-batch size": "32",
    }
    shown = panel._picture()
    assert "<style" not in shown
    assert "notebook_launch(train, 2, kwargs={&quot;lr&quot;: 0.5}, seed=3)" in shown
    assert "2 CPU ranks, gloo" in shown
