"""Batch, sharding and code of a panel: the call that its settings make."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import traitlets

from notebook_launcher import LaunchConfig
from notebook_launcher.widgets import ConfigPanel
from tests.support.panels import Model, Optimizer, field, note_of, pasted, train, type_in, words_of

pytestmark = pytest.mark.usefixtures("small_machine")


def test_effective_batch_is_a_formula():
    panel = ConfigPanel(train, 2)
    type_in(panel, "batch_size", "16")
    type_in(panel, "gradient_accumulation_steps", "4")
    assert panel.effective_batch == 128
    assert panel.form["batch"] == {
        "factors": [["16", "micro-batch"], ["4", "accumulation"], ["2", "processes"]],
        "total": "128",
        "unit": "samples",
    }
    type_in(panel, "gradient_accumulation_steps", "x")
    assert panel.effective_batch is None
    assert panel.form["batch"]["total"] == "?"


def test_panel_shows_the_steps_and_the_precision_that_the_environment_gives(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    panel = ConfigPanel(train, 2)
    assert panel.effective_batch == 256
    assert field(panel, "gradient_accumulation_steps")["placeholder"] == "4 (ACCELERATE_GRADIENT_ACCUMULATION_STEPS)"
    assert words_of(panel, "mixed_precision")[field(panel, "mixed_precision")["value"]] == "bf16"
    assert "steps" not in panel.code
    type_in(panel, "gradient_accumulation_steps", "1")
    type_in(panel, "mixed_precision", "no")
    assert panel.effective_batch == 64
    assert panel.code.endswith('notebook_launch(train, 2, mixed_precision="no", gradient_accumulation_steps=1)')
    panel.config = LaunchConfig(num_processes=2, env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"})
    assert panel.effective_batch is None
    assert field(panel, "gradient_accumulation_steps")["placeholder"] == "? (ACCELERATE_GRADIENT_ACCUMULATION_STEPS)"


def test_micro_batch_must_be_at_least_one_sample():
    panel = ConfigPanel(train, 2)
    type_in(panel, "batch_size", "0")
    assert "Enter a whole number, 1 or more." in note_of(panel, "batch_size")
    assert (panel.effective_batch, panel.launch_button.disabled) == (None, True)
    own_meaning = ConfigPanel(lambda batch_size=-1: 0, 2)
    assert (own_meaning.effective_batch, own_meaning.problems) == (None, {})


@pytest.mark.parametrize("name", ["micro_batch_size", "batch_size"])
def test_micro_batch_is_the_functions_own_parameter(name):
    namespace: dict[str, Any] = {}
    exec(f"def function({name}: int = 8): pass", namespace)
    panel = ConfigPanel(namespace["function"], 2)
    assert field(panel, name)["label"] == "Micro-batch size"
    assert panel.effective_batch == 16


def test_function_without_a_micro_batch_size_names_the_parameter_to_add():
    panel = ConfigPanel(lambda lr=0.1: lr, 2, gradient_accumulation_steps=4)
    micro_batch = panel.form["fields"][panel.form["essential"][1]]
    assert micro_batch["disabled"]
    assert "has no parameter for the micro-batch size. Add a parameter named batch_size" in micro_batch["note"]
    assert (panel.form["batch"]["total"], panel.form["batch"]["unit"]) == ("8", "micro-batches")
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
    assert field(panel, "lr")["placeholder"] == "0.5"
    names.update(panel=ConfigPanel(functools.partial(train, lr=0.5)))
    assert names["panel"].code.splitlines()[-1] == "notebook_launch(panel.fn)"


def test_function_with_kwargs_takes_any_argument(names):
    def function(lr=0.1, **more):
        pass

    names.update(function=function)
    panel = ConfigPanel(function, kwargs={"depth": 3})
    panel.arguments["width"] = 4
    assert panel.view.state.call() == ((), {"depth": 3, "width": 4})
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


@pytest.mark.parametrize("value", [None, {"num_processes": 2}])
def test_invalid_config_is_refused_and_changes_nothing(value):
    panel = ConfigPanel(train, 2)
    with pytest.raises(traitlets.TraitError, match="expected a LaunchConfig"):
        panel.config = value
    assert panel.config == LaunchConfig(num_processes=2)
    assert field(panel, "num_processes")["value"] == "2"


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
    assert panel.view.state.call() == ((1,), {"c": 4})
    panel.arguments["b"] = 5
    assert panel.view.state.call() == ((1, 5), {"c": 4})


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
