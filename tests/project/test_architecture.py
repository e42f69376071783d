"""Arrows that must never exist, circles of modules, and names of files, read from the source of every module.

`RULES` lists the forbidden imports, each with its reason; docs/architecture.md draws the same picture. Imports under
`if TYPE_CHECKING:` do not count, because they are never executed.
"""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "notebook_launcher"
STANDARD_LIBRARY = sorted(sys.stdlib_module_names)
LIBRARIES = (*STANDARD_LIBRARY, "cloudpickle", "numpy", "psutil", "torch")
FOUNDATIONS = (
    "colours",
    "config",
    "context",
    "errors",
    "facade",
    "installed",
    "ipython_shell",
    "messaging",
    "pictures",
    "reporting",
    "settings",
    "tracebacks",
    "wording",
)
"""Modules and packages that everything else may import."""
TRAINING_ROOMS = (
    "process",
    "operations",
    "recording",
    "requests",
    "accumulation",
    "data",
    "rank_check",
    "parallelism",
    "checkpoints",
)
"""The rooms of `training`: each may import those before it."""
KERNEL_ROOMS = ("display", "comms", "inspection", "metering", "failures", "calls", "run", "cells")
"""The rooms of `kernel`: each may import those before it."""
TRAINING_TOP = ("accelerator", "preparation")
"""The modules of `training` that put its rooms together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Imports that some modules must not have."""

    who: tuple[str, ...]
    reason: str
    exempt: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """If given, everything that is not in it is forbidden."""
    deferred: bool = True
    """True if the rule holds inside functions as well as at the top of the module."""

    def binds(self, module: str) -> bool:
        return _within(module, self.who) and not _within(module, self.exempt)

    def forbids(self, imported: Import) -> bool:
        if imported.deferred and not self.deferred:
            return False
        # `from notebook_launcher.messaging import messages` names the package beside the module that it is about.
        outside = imported.name != PACKAGE and not _within(imported.name, self.only)
        return (bool(self.only) and outside) or _within(imported.name, self.never)


@dataclass(frozen=True, slots=True)
class Import:
    """One module that a module imports."""

    name: str
    line: int
    deferred: bool


RULES = [
    Rule(
        who=(PACKAGE,),
        exempt=(
            f"{PACKAGE}.widgets",
            f"{PACKAGE}.kernel.views",
            f"{PACKAGE}.archive.listing",
            f"{PACKAGE}.command_line",
        ),
        never=(f"{PACKAGE}.widgets",),
        reason="the engine knows no view, but for a run's monitor, the list of runs and the program",
    ),
    Rule(
        who=(f"{PACKAGE}.kernel.views", f"{PACKAGE}.archive.listing"),
        never=(f"{PACKAGE}.widgets",),
        deferred=False,
        reason="a launch that is over within a second imports no view",
    ),
    Rule(who=(PACKAGE,), never=("widgets",), reason="the bare name makes a second copy of the widgets"),
    Rule(
        who=(f"{PACKAGE}.training",),
        never=(f"{PACKAGE}.kernel",),
        reason="a rank talks to its run through context alone",
    ),
    *(
        Rule(
            who=(f"{PACKAGE}.training.{room}",),
            never=tuple(f"{PACKAGE}.training.{name}" for name in (*TRAINING_ROOMS[at:], *TRAINING_TOP)),
            reason=f"{room} knows nothing of the rooms that use it",
        )
        for at, room in enumerate(TRAINING_ROOMS, 1)
    ),
    Rule(
        who=(f"{PACKAGE}.widgets",),
        never=tuple(
            f"{PACKAGE}.{name}"
            for name in ("processes", "training", "detached", "engines.board", "engines.process_tree", "engines.tree")
        ),
        reason="widgets are views: they know runs, and of engines the text form alone",
    ),
    *(
        Rule(
            who=(f"{PACKAGE}.kernel.{room}",),
            never=tuple(f"{PACKAGE}.kernel.{name}" for name in KERNEL_ROOMS[at:]),
            reason=f"{room} knows nothing of the rooms that use it",
        )
        for at, room in enumerate(KERNEL_ROOMS, 1)
    ),
    Rule(
        who=tuple(f"{PACKAGE}.{name}" for name in FOUNDATIONS),
        exempt=(f"{PACKAGE}.settings.engine_choice", f"{PACKAGE}.settings.accelerate_yaml", f"{PACKAGE}.config"),
        only=(*STANDARD_LIBRARY, *(f"{PACKAGE}.{name}" for name in FOUNDATIONS)),
        reason="both sides read these before anything heavy is there",
    ),
    Rule(
        who=(f"{PACKAGE}.config", f"{PACKAGE}.settings"),
        only=(*STANDARD_LIBRARY, "yaml", *(f"{PACKAGE}.{name}" for name in (*FOUNDATIONS, "engines", "machine"))),
        reason="an option names an engine, and to_yaml() counts the machine's GPUs: nothing else is needed",
    ),
    Rule(
        who=(f"{PACKAGE}.config", f"{PACKAGE}.settings"),
        only=(*STANDARD_LIBRARY, *(f"{PACKAGE}.{name}" for name in FOUNDATIONS)),
        deferred=False,
        reason="options are read before anything heavy is there",
    ),
    Rule(
        who=(f"{PACKAGE}.wording",),
        only=(*STANDARD_LIBRARY, f"{PACKAGE}.wording"),
        reason="words for people are needed everywhere, also where nothing else is there",
    ),
    Rule(
        who=(f"{PACKAGE}.machine",),
        only=(
            *STANDARD_LIBRARY,
            *(f"{PACKAGE}.{name}" for name in ("errors", "machine", "messaging.board_layout", "wording")),
        ),
        reason="what a machine has is known without a launch",
    ),
    Rule(
        who=(f"{PACKAGE}.settings",),
        never=(f"{PACKAGE}.config",),
        reason="a settings file and checks have plain values; LaunchConfig gives them their meaning",
    ),
    Rule(
        who=(f"{PACKAGE}.history",),
        # pandas: `RunMetrics.to_pandas`, when it is called.
        only=(*STANDARD_LIBRARY, "pandas", *(f"{PACKAGE}.{name}" for name in ("errors", "history", "wording"))),
        reason="records and folders of runs are plain data; who draws them reads them",
    ),
    Rule(
        who=(f"{PACKAGE}.archive",),
        never=(f"{PACKAGE}.kernel", f"{PACKAGE}.engines", f"{PACKAGE}.detached"),
        reason="a run of another kernel is read without launching anything",
    ),
    Rule(
        who=(f"{PACKAGE}.travel",),
        only=(*LIBRARIES, *(f"{PACKAGE}.{name}" for name in (*FOUNDATIONS, "machine", "travel"))),
        reason="both ends of a launch pack and unpack, and neither is needed for it",
    ),
    Rule(
        who=(f"{PACKAGE}.notebook_code",),
        only=(*LIBRARIES, f"{PACKAGE}.errors", f"{PACKAGE}.notebook_code"),
        reason="the source of a function is found without a launch",
    ),
    Rule(
        who=(PACKAGE,),
        exempt=(f"{PACKAGE}.exporting", f"{PACKAGE}.widgets"),
        never=(f"{PACKAGE}.exporting",),
        reason="a script is written for a user, from the panel or by a call",
    ),
    Rule(
        who=(f"{PACKAGE}.exporting",),
        never=tuple(f"{PACKAGE}.{name}" for name in ("engines", "processes", "training", "detached", "archive")),
        reason="a script is written from a plan, and nothing runs",
    ),
    Rule(
        who=(PACKAGE,),
        exempt=(
            f"{PACKAGE}.detached",
            f"{PACKAGE}.command_line",
            f"{PACKAGE}.kernel.launch",
            f"{PACKAGE}.kernel.session",
        ),
        never=(f"{PACKAGE}.detached",),
        reason="a run does not know its host: launch() and Session() start one, and the program attaches to one",
    ),
    Rule(
        who=(f"{PACKAGE}.detached",),
        never=(f"{PACKAGE}.training", "torch.distributed", "torch"),
        reason="a host conducts as a kernel does, and clients are kernels",
    ),
    Rule(
        who=(f"{PACKAGE}.diagnosis",),
        never=tuple(f"{PACKAGE}.{name}" for name in ("engines", "processes", "training", "detached", "gpu_check")),
        reason="a diagnosis looks at the machine, and launches as a user does",
    ),
    Rule(
        who=(f"{PACKAGE}.gpu_check",),
        never=tuple(f"{PACKAGE}.{name}" for name in ("kernel", "engines", "processes", "detached")),
        reason="a check on GPUs uses public names alone, as a user's program does",
    ),
    Rule(
        who=(PACKAGE,),
        exempt=(f"{PACKAGE}.gpu_check", f"{PACKAGE}.command_line"),
        never=(f"{PACKAGE}.gpu_check",),
        reason="the checks run when a user types their command",
    ),
    Rule(
        who=(PACKAGE,),
        exempt=(f"{PACKAGE}.command_line", f"{PACKAGE}.__main__"),
        never=(f"{PACKAGE}.command_line",),
        reason="the program is one of the users of this package",
    ),
    Rule(
        who=(f"{PACKAGE}.command_line",),
        only=(*STANDARD_LIBRARY, *(f"{PACKAGE}.{name}" for name in (*FOUNDATIONS, "command_line"))),
        deferred=False,
        reason="each command imports its needs, so that --help is quick",
    ),
    Rule(
        who=(PACKAGE,),
        exempt=(f"{PACKAGE}.compat",),
        never=(f"{PACKAGE}.compat",),
        reason="compat is the same code by other rules, and nothing needs it",
    ),
    Rule(
        who=(f"{PACKAGE}.compat",),
        never=tuple(f"{PACKAGE}.{name}" for name in ("engines", "processes", "detached", "command_line")),
        reason="compat is names for code that is elsewhere",
    ),
    Rule(
        who=(f"{PACKAGE}.drawing",),
        only=(*STANDARD_LIBRARY, *(f"{PACKAGE}.{name}" for name in ("colours", "drawing", "history", "wording"))),
        reason="a picture is drawn from plain data, wherever that was read",
    ),
    Rule(
        who=(f"{PACKAGE}.processes",),
        never=(f"{PACKAGE}.kernel",),
        reason="a rank is not a kernel",
    ),
    Rule(
        who=(f"{PACKAGE}.kernel",),
        never=(f"{PACKAGE}.processes", "torch.distributed"),
        reason="a kernel reaches processes through engines and never joins a group",
    ),
    Rule(
        who=(f"{PACKAGE}.kernel",),
        never=tuple(f"{PACKAGE}.engines.{name}" for name in ("process_tree", "starting", "rank_pipes", "cluster")),
        reason="a kernel has a tree, and does not know which",
    ),
    Rule(
        who=(f"{PACKAGE}.engines",),
        never=(f"{PACKAGE}.kernel",),
        reason="an agent on another machine has a tree and no kernel",
    ),
    Rule(
        who=(PACKAGE,),
        exempt=(f"{PACKAGE}.processes", f"{PACKAGE}.training"),
        never=("torch",),
        deferred=False,
        reason="importing the package costs no torch",
    ),
]


CIRCLES: dict[frozenset[str], str] = {
    frozenset(
        {
            "archive.listing",
            "archive.opening",
            "widgets.runs.comparison",
            "widgets.runs.readers",
            "widgets.runs.runs_table",
        }
    ): "a list of runs shows itself as a table, whose comparison opens runs of the list",
    frozenset({"training.recording.device_phases", "training.recording.phases"}): (
        "a clock that is pickled arrives as the clock of its new process, which may be that of a GPU"
    ),
}
"""Modules that import each other, each circle with its reason."""


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _imports(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Yield the imports in `source`; `from a import b` counts as `a` and, because b may be a module, as `a.b`.

    Args:
        source: The source of a module.
        module: Its name.
        is_package: True if the source is that of an `__init__.py`.
    """
    home = module.split(".") if is_package else module.split(".")[:-1]
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, deferred = pending.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                pending.extend((child, deferred) for child in node.orelse)
                continue
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno, deferred) for alias in names)
            case ast.ImportFrom(module=origin, names=names, level=level):
                parents = home[: len(home) - level + 1] if level else []
                base = ".".join([*parents, *([origin] if origin else [])])
                yield Import(base, node.lineno, deferred)
                yield from (Import(f"{base}.{alias.name}", node.lineno, deferred) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, node.lineno, deferred)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def _violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    found = _imports(source, module, is_package=is_package)
    return sorted(
        {
            f"{module}:{imported.line} imports {imported.name}: {rule.reason}"
            for imported in found
            for rule in RULES
            if rule.binds(module) and rule.forbids(imported)
        }
    )


def _modules() -> dict[str, Path]:
    """Return every module of the package, by the name it has once installed."""
    trees = {PACKAGE: ROOT / PACKAGE, f"{PACKAGE}.widgets": ROOT / "widgets"}
    return {
        ".".join([name, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for name, folder in trees.items()
        for path in sorted(folder.rglob("*.py"))
    }


MODULES = _modules()


def test_imports_follow_the_layers():
    assert [
        violation
        for module, path in MODULES.items()
        for violation in _violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    ] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernel.session", "import notebook_launcher.widgets.panel"),
        ("kernel.session", "from notebook_launcher import widgets"),
        ("kernel.session", "from ..widgets import panel"),
        ("kernel.session", "import widgets"),
        ("kernel.views", "from notebook_launcher.widgets import auto"),
        ("kernel.session", "def f():\n    import torch.distributed as dist"),
        ("kernel.session", "def f():\n    from torch import distributed"),
        ("kernel.session", "from notebook_launcher.processes import rank"),
        ("kernel.session", "import importlib\nimportlib.import_module('notebook_launcher.processes.rank.rank')"),
        ("kernel.session", "if True:\n    import torch"),
        ("kernel.run.attempt", "from notebook_launcher.engines.process_tree import ProcessTree"),
        ("kernel.ranks", "def f():\n    from notebook_launcher.engines.cluster.node import Node"),
        ("engines.cluster.agent", "from notebook_launcher.kernel.run.handle import Run"),
        ("processes.rank", "from ..kernel.run import Run"),
        ("training.accelerator", "def f():\n    import notebook_launcher.kernel.run.handle"),
        ("training.process.arrivals", "from notebook_launcher.training.operations import gather"),
        ("training.accumulation.members", "from notebook_launcher.training.rank_check import check"),
        ("training.data.prepare", "def f():\n    from notebook_launcher.training.accelerator import Accelerator"),
        ("messaging.messages", "import numpy"),
        ("machine.devices", "from notebook_launcher.kernel import plan"),
        ("settings.accelerate_yaml", "def f():\n    from notebook_launcher.kernel.plan import make_plan"),
        ("settings.accelerate_yaml", "from notebook_launcher.config import LaunchConfig"),
        ("settings.engine_choice", "from notebook_launcher.engines.engine import Engine"),
        ("installed", "import psutil"),
        ("travel.parcel", "def f():\n    from notebook_launcher.kernel import plan"),
        ("notebook_code", "from notebook_launcher.kernel.plan import make_plan"),
        ("kernel.calls.origin", "from notebook_launcher.exporting import export"),
        ("exporting", "def f():\n    from notebook_launcher.engines.fork_server_handle import start"),
        ("archive.listing", "def f():\n    from notebook_launcher.detached.attached_run import AttachedRun"),
        ("kernel.run.thread", "from notebook_launcher.detached import host_socket"),
        ("detached.host", "def f():\n    import torch"),
        ("diagnosis.doctor", "from notebook_launcher.engines.tree import Tree"),
        ("gpu_check.checks", "from notebook_launcher.kernel.launch import launch"),
        ("diagnosis.doctor", "def f():\n    from notebook_launcher.gpu_check import checks"),
        ("kernel.launch", "from notebook_launcher.command_line import program"),
        ("command_line.program", "from notebook_launcher.kernel.launch import launch"),
        ("training.accelerator", "from notebook_launcher.compat import names"),
        ("compat.launchers", "from notebook_launcher.engines.tree import Tree"),
        ("history.recorder", "from notebook_launcher.drawing import tables"),
        ("archive.recorded", "def f():\n    from notebook_launcher.kernel.run.handle import Run"),
        ("drawing.curves", "import numpy"),
        ("drawing.run_picture", "from notebook_launcher.kernel.run.handle import Run"),
        ("messaging.messages", "from notebook_launcher.kernel import run"),
        ("config", "try:\n    import yaml\nexcept ImportError:\n    pass"),
        ("widgets.panel", "import widgets.monitor"),
    ],
)
def test_forbidden_import_is_reported(module, source):
    assert _violations(source, f"{PACKAGE}.{module}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernel.session", "def f():\n    import torch"),
        ("kernel.views", "def f():\n    from notebook_launcher.widgets import auto"),
        ("kernel.session", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed"),
        ("processes.rank", "import torch.distributed"),
        ("training.rank_check.check", "from notebook_launcher.training.accumulation import ddp"),
        ("widgets.panel", "from notebook_launcher.widgets import monitor"),
        ("settings.engine_choice", "def f():\n    from notebook_launcher.engines.cluster.clusters import SSH"),
        ("kernel.launch", "def f():\n    from notebook_launcher.detached.host_start import start_detached"),
        ("command_line.program", "def f():\n    from notebook_launcher.kernel.launch import launch"),
        ("messaging.channel", "import socket\nfrom notebook_launcher.messaging import messages"),
    ],
)
def test_allowed_import_is_not_reported(module, source):
    assert _violations(source, f"{PACKAGE}.{module}") == []


def _graph() -> dict[str, set[str]]:
    """Return the modules that each module imports. Facades are left out: they only name what others define."""
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        if "LazyNames(__name__)" not in source:
            found = _imports(source, module, is_package=path.name == "__init__.py")
            names = {imported.name for imported in found}
            # `from a import b` also counts as an import of a; where b is a module, it is not one.
            parents = {name.rpartition(".")[0] for name in names if name in MODULES}
            graph[module] = {name for name in names if name in MODULES and name != module} - parents
    return graph


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = graph.get(pending.pop(), set()) - seen
        seen |= new
        pending.extend(new)
    return seen


def test_every_circle_of_modules_is_listed_with_a_reason():
    graph = _graph()
    reached = {module: _reachable(graph, module) for module in graph}
    circles = {
        frozenset(other.removeprefix(f"{PACKAGE}.") for other in reached[module] if module in reached.get(other, ()))
        for module in graph
        if module in reached[module]
    }
    assert circles == CIRCLES.keys()


def _facade_order(name: str) -> tuple[bool, bool, str]:
    """Constants, classes, functions, as ruff sorts them (RUF022)."""
    return not name.isupper(), name[0].islower(), name


def test_public_names_are_sorted_and_exist():
    modules = [importlib.import_module(name) for name, path in MODULES.items() if "__all__" in path.read_text("utf-8")]
    unsorted = [
        module.__name__ for module in modules if [*module.__all__] != sorted(set(module.__all__), key=_facade_order)
    ]
    missing = [
        f"{module.__name__}.{name}" for module in modules for name in module.__all__ if not hasattr(module, name)
    ]
    assert (unsorted, missing) == ([], [])
