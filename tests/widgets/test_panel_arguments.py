"""Fields of a panel for the function's parameters."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Union

import pytest

from notebook_launcher import ConfigError, find_executable_batch_size
from notebook_launcher.widgets import ConfigPanel
from notebook_launcher.widgets.launching.parameters import MISSING, signature_parameters
from tests.support.panels import Model, Optimizer, arguments_of, field, note_of, train, type_in, words_of

pytestmark = pytest.mark.usefixtures("small_machine")


@pytest.mark.parametrize(
    ("annotation", "default", "kind", "optional"),
    [
        (int, 3, "int", False),
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
    (parameter,) = signature_parameters(function)
    assert (parameter.kind, parameter.optional) == (kind, optional)
    assert parameter.fits(default) is (kind != "code" or default in (MISSING, None))


def test_every_sort_of_callable_has_its_parameters():
    class Trainer:
        def fit(self, lr: float = 0.1):
            pass

        def __call__(self, steps: int = 1):
            pass

    assert arguments_of(ConfigPanel(Trainer().fit)) == ["lr"]
    assert arguments_of(ConfigPanel(Trainer())) == ["steps"]
    assert arguments_of(ConfigPanel(functools.partial(train, lr=0.5))) == ["lr", "epochs", "batch_size"]
    assert arguments_of(ConfigPanel(lambda *args, **kwargs: 0)) == []
    assert arguments_of(ConfigPanel(sum)) == ["iterable", "start"]
    assert arguments_of(ConfigPanel(dict)) == []


def test_arguments_that_a_decorator_may_supply_are_not_demanded():
    def supplies_the_rate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **{"lr": 0.5, **kwargs})

        return wrapper

    class Trainer:
        @supplies_the_rate
        def fit(self, lr, epochs=1):
            return lr, epochs

    @find_executable_batch_size(starting_batch_size=4)
    def sized(batch_size, lr=0.1):
        pass

    for function in (Trainer().fit, functools.partial(Trainer().fit)):
        panel = ConfigPanel(function)
        assert (arguments_of(panel), panel.problems) == (["lr", "epochs"], {})
        type_in(panel, "lr", "0.1")
        assert dict(panel.arguments) == {"lr": 0.1}
    assert arguments_of(ConfigPanel(sized)) == ["lr"]


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
        ("path", "'data", "Enter a Python literal, such as 3"),
        ("sizes", "[1,", "Enter a Python literal, such as 3, 'text' or [1, 2]."),
    ],
)
def test_typed_argument_without_a_value_is_refused(name, typed, message):
    def function(lr=0.1, epochs=3, sizes=(1, 2), path=None):
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
        (list[int], "[1]", "(1, 2)", "Enter a literal of type list[int], such as [1, 2]."),
        ("list[float] | None", "[1, 0.5]", "(1, 2)", "of type list[float]"),
        (tuple[int, str], "(1, 'a')", "[1, 2]", "of type tuple[int, str], such as (1, 2)."),
        (frozenset[int], "{1}", "[1]", "of type frozenset[int]"),
        (Sequence[str], "('a',)", "'a'", "of type Sequence[str]"),
        (list[Model], "[1]", "1", "Enter a literal of type list["),
    ],
)
def test_typed_container_has_the_type_of_the_annotation(annotation, right, wrong, words):
    def function(layers=None):
        pass

    function.__annotations__["layers"] = annotation
    (parameter,) = signature_parameters(function)
    assert parameter.parse(right) == ast.literal_eval(right)
    with pytest.raises(ValueError, match=re.escape(words)):
        parameter.parse(wrong)


def test_required_argument_that_cannot_be_typed_comes_from_code():
    def function(model: Model, data, *, steps: int):
        pass

    panel = ConfigPanel(function)
    assert set(panel.problems) == {"arguments.model", "arguments.data", "arguments.steps"}
    assert 'Set it from code: panel.arguments["model"] = ...' in note_of(panel, "model")
    panel.arguments["model"] = Model()
    panel.arguments["data"] = Model()
    assert field(panel, "data")["placeholder"] == "from code: Model"
    type_in(panel, "steps", "3")
    assert panel.problems == {}
    assert "Taken from code" in note_of(panel, "model")
    assert field(panel, "model")["value"] == "Model"
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
    with pytest.raises(ConfigError, match=r"fn=3 is an int, which cannot be called\."):
        ConfigPanel(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"arguments\['x'\]: nothing has no parameter .* It takes none"):
        ConfigPanel(kwargs={"x": 3})
    anything = ConfigPanel(lambda **kwargs: 0, kwargs={"x": 3})
    assert dict(anything.arguments) == {"x": 3}


@pytest.mark.parametrize(
    ("annotation", "default", "typed", "value", "note"),
    [
        (MISSING, None, "data/train.csv", "data/train.csv", 'Read as the text "data/train.csv".'),
        (MISSING, None, "3", 3, 'Read as a number. Write "3" for a text.'),
        (MISSING, None, "[1, 2]", [1, 2], ""),
        (MISSING, None, "true", "true", "Write True for the truth value."),
        (MISSING, None, "True", True, ""),
        ("int | str", 1, "auto", "auto", 'Read as the text "auto".'),
        ("str | None", None, "None", "None", 'Read as the text "None". Empty the field for None.'),
        ("str", "x", "'y'", "'y'", "The quotes are read as part of the text. Leave them out."),
        ("Path | None", None, "a b/c", Path("a b/c"), ""),
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
    assert panel.view.state.value_of("path") == value
    assert note in note_of(panel, "path")
    assert bool(note) or "Read" not in note_of(panel, "path")


@pytest.mark.parametrize(
    ("default", "annotation", "value", "note"),
    [
        (0.1, "float", 0.1, "Empty means 0.1."),
        ("x", "str", "", 'Empty means "".'),
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
    assert field(panel, "x")["value"] == ""
    assert panel.view.state.value_of("x") == value
    assert note in note_of(panel, "x")


def test_list_of_choices_shows_the_value_that_is_set():
    def function(opt: Literal["a", "b"] = "other", n: Literal[1, "1"] = 1, kind: Optimizer = "adam"):  # type: ignore[assignment]
        pass

    panel = ConfigPanel(function)
    assert words_of(panel, "opt") == ["other", "a", "b"]
    assert words_of(panel, "n") == ["1", "'1'"]
    assert words_of(panel, "kind") == ["adam", "ADAM", "SGD"]
    panel.arguments["opt"] = "new"
    assert words_of(panel, "opt")[field(panel, "opt")["value"]] == "from code: 'new'"
    type_in(panel, "opt", 1)
    assert panel.arguments["opt"] == "a"
    assert "from code" not in str(words_of(panel, "opt"))


def test_code_is_withheld_from_the_clipboard_while_a_field_is_wrong():
    panel = ConfigPanel(train, 2, seed=7)
    assert panel.form["code"]["note"] == ""
    type_in(panel, "seed", "7x")
    type_in(panel, "lr", "fast")
    assert "Fix Seed and lr to bring this code up to date." in panel.form["code"]["note"]
    required = ConfigPanel(lambda data: 0)
    assert "Fix data to bring this code up to date." in required.form["code"]["note"]
    assert "Fix Processes to run this code on this machine." in ConfigPanel(train, 65).form["code"]["note"]


def test_code_of_a_panel_without_a_name_asks_for_one(names):
    panel = ConfigPanel(lambda model=None: 0, kwargs={"model": Model()})
    assert "Give the panel a name first: panel = ConfigPanel(...)" in panel.form["code"]["note"]
    names["mine"] = panel
    panel.draw()
    assert "Give the panel a name" not in panel.form["code"]["note"]
    assert "mine.fn" in panel.code


def test_panel_reports_that_its_function_was_defined_again(names):
    exec("def loop(): pass", names)
    first = names["loop"]
    panel = names["panel"] = ConfigPanel(first, 2)
    assert panel.code.endswith("notebook_launch(loop, 2)")
    exec("def loop(): return 1", names)
    panel.draw()
    assert panel.code.endswith("notebook_launch(panel.fn, 2)")
    assert "loop was defined again: run this cell again to launch the new version." in panel.run_area.status_text


def test_launch_by_code_warns_of_a_function_that_was_defined_again(names):
    exec("def loop(): return 1", names)
    panel = ConfigPanel(names["loop"], 1, devices="cpu", output="none")
    exec("def loop(): return 2", names)
    with pytest.warns(UserWarning, match=r"loop was defined again.* launches the earlier loop.*panel.launch\(loop\)"):
        assert list(panel.launch().result()) == [1]
    assert list(panel.launch(names["loop"]).result()) == [2]


def test_function_that_cannot_be_launched_disables_launch():
    async def function():
        pass

    panel = ConfigPanel(function)
    assert "is a coroutine function" in panel.problems[""]
    assert panel.launch_button.disabled
    assert "make the panel with ConfigPanel(train)" in ConfigPanel().problems[""]
