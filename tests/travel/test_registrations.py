"""What cells have put into registries of libraries, in ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import run_cell

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

KERNEL_FILES = {
    "library.py": """
import abc, functools, weakref
WEAK = weakref.WeakKeyDictionary()
TABLE, LIST, SET, GROUPS, UNSEEN = {}, [], set(), {"base": {}}, {}
def look_up(name): return UNSEEN[name]()
def register(name, value): TABLE[name] = value
def register_weakly(key, value): WEAK[key] = value
def add(value): LIST.append(value); SET.add(value)
def group(group, name, value): GROUPS.setdefault(group, {})[name] = value
def build(name): return TABLE[name]()
class Box:
    def __init__(self, value): self.value = value
class Store:
    def __init__(self): self._extra = {}
    def register(self, key, value): self._extra[key] = Box(value)
STORE = Store()
@functools.singledispatch
def encode(value): return "plain"
class Target: pass
class Abstract(abc.ABC): ENTRIES = {}
def resolver(name, function):
    def wrapper(*args): return function(*args)
    Abstract.ENTRIES[name] = wrapper
def register_new(name, function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args)
    TABLE[name] = wrapper
def patch_in(function): Target.patched = function
def register_by_name(function): TABLE[function.__name__] = function
class Base:
    KINDS = {}
    def __init_subclass__(cls): Base.KINDS[cls.__name__] = cls
class Listed: pass
def made(name): return {cls.__name__: cls for cls in Listed.__subclasses__()}[name]()
def accessor(name):
    def put(cls): setattr(Target, name, Box(cls)); return cls
    return put
""",
    "plug.py": "import library; library.register('plug', dict)",
}
KERNEL_CODE = """
import codecs, collections.abc, copyreg, functools, os, pandas, torch, library, plug
from notebook_launcher import Commands, Session, notebook_launch

class A: pass
class B: pass
class C: pass
class Money: pass
class Dist(torch.distributions.Normal): pass
def f(): return "f"
def g(): return "g"
def money(value): return "money"

library.register("a", A)
library.register_weakly(A, f)
library.register_weakly(g, f)
library.add(B)
library.group("new", "g", g)
library.STORE.register(C, f)
library.encode.register(Money, money)
copyreg.pickle(Money, lambda value: (Money, ()))
library.resolver("wrapped", f)
library.register_new("lambda", lambda number: number // 2)

@library.accessor("geo")
class Geo: pass
class ByBase(library.Base):
    def __new__(cls): return 8
class ByList(library.Listed): name = "listed"
class Holder:
    def __init__(self, value): self.value = value
holder = Holder(3)
library.register("object", holder)
library.register("partial", functools.partial(f))
def find_codec(name): return codecs.lookup("rot13") if name == "secret" else None
codecs.register(find_codec)
codecs.register_error("mine", lambda error: ("?", error.end))
@collections.abc.Sequence.register
class Sequence: pass
from tqdm import tqdm
tqdm.pandas()

@torch.distributions.kl.register_kl(Dist, Dist)
def divergence(p, q): return 7

def look():
    return {
        "dict": library.TABLE.get("a") is A,
        "list": library.LIST == [B],
        "weak keys": len(library.WEAK) == 2 and library.WEAK[A]() == library.WEAK[g]() == "f",
        "set": library.SET == {B},
        "group": library.GROUPS.get("new", {}).get("g", int)() == "g",
        "wrapped": library.Abstract.ENTRIES.get("wrapped", int)() == "f",
        "lambda": "lambda" in library.TABLE and library.TABLE["lambda"](8) == 4,
        "object": C in library.STORE._extra and library.STORE._extra[C].value() == "f",
        "singledispatch": library.encode(Money()) == "money",
        "copyreg": Money in copyreg.dispatch_table,
        "accessor": hasattr(library.Target, "geo") and library.Target.geo.value is Geo,
        "base": library.Base.KINDS.get("ByBase", int)() == 8,
        "subclasses": library.made("ByList").name == "listed",
        "instance": library.TABLE.get("object") is not None and library.TABLE["object"].value == 3,
        "partial": library.TABLE.get("partial", int)() == "f",
        "codec": codecs.decode("uryyb", "secret") == "hello",
        "error handler": b"a\\xff".decode("ascii", "mine") == "a?",
        "abc": isinstance(Sequence(), collections.abc.Sequence),
        "tqdm": hasattr(pandas.DataFrame, "progress_apply"),
        "torch": (Dist, Dist) in torch.distributions.kl._KL_REGISTRY,
    }

def missing(results):
    return sorted({name for found in results for name, is_there in found.items() if not is_there})
"""


def _missing(kernel: Kernel, call: str) -> str | None:
    outcome = kernel.execute(f"missing({call})")
    assert outcome.error is None, outcome.traceback
    return outcome.result


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_registrations_by_cells_hold_in_ranks(start_method: str, module_kernel: Kernel) -> None:
    call = f"notebook_launch(look, 2, start_method={start_method!r}, output='none')"
    assert _missing(module_kernel, call) == "[]"


@pytest.mark.slow
def test_registrations_hold_in_detached_runs_and_on_other_machines(module_kernel: Kernel) -> None:
    assert _missing(module_kernel, "notebook_launch(look, 2, detached=True, output='none')") == "[]"
    module_kernel.execute("engine = Commands([[]])")
    assert _missing(module_kernel, "notebook_launch(look, 1, engine=engine, output='none')") == "[]"
    module_kernel.execute("engine.close()")


def test_call_whose_effect_cannot_be_found_is_named_once(module_kernel: Kernel) -> None:
    call = "notebook_launch(int, 2)"
    assert "ranks lack" not in run_cell(module_kernel, call).stdout
    run_cell(module_kernel, "%load_ext notebook_launcher\nlibrary.register('text', 'of:a:plug')")
    run_cell(module_kernel, "def set_up(): own = torch.library.Library('aten', 'IMPL')\nset_up()")
    said = run_cell(module_kernel, call).stdout
    assert "ranks lack what `library.register('text', 'of:a:plug')`, `torch.library.Library('aten', 'IMPL')`" in said
    assert "run it in a `%%everywhere` cell" in said
    quiet = ("%%everywhere\nlibrary.register('text', 1)", "torch.nn.Linear(1, 1).register_buffer('x', None)", "int(1)")
    for cell in quiet:
        run_cell(module_kernel, cell)
        assert "ranks lack" not in run_cell(module_kernel, call).stdout
    run_cell(module_kernel, "%everywhere --clear")


def test_session_follows_what_cells_register_and_remove(module_kernel: Kernel) -> None:
    module_kernel.execute("session = Session(2, output='none').__enter__()")
    assert [_missing(module_kernel, "session.run(look)") for _ in range(2)] == ["[]", "[]"]
    module_kernel.execute("kept = library.TABLE.pop('a'); library.LIST.clear(); library.SET.clear()")
    assert _missing(module_kernel, "session.run(look)") == "['dict', 'list', 'set']"
    module_kernel.execute("library.register('a', A); library.add(B)")
    assert _missing(module_kernel, "session.run(look)") == "[]"
    module_kernel.execute("session.close()")


def test_work_without_a_registration_carries_nothing(module_kernel: Kernel) -> None:
    outcome = module_kernel.execute(
        "from notebook_launcher.travel.registrations import find_registrations\n"
        "class Net(torch.nn.Module):\n    def forward(self, x): return x\n"
        "def collate(rows): return torch.stack(rows)\n"
        "def hook(*_): pass\n"
        "net = torch.nn.Sequential(Net()); net.register_forward_hook(hook)\n"
        "loader = torch.utils.data.DataLoader(torch.zeros(4, 1), collate_fn=collate); next(iter(loader))\n"
        "own = {'net': Net}\n"
        "find_registrations([Net, collate, hook, look])[0]"
    )
    assert outcome.result == "[]", outcome.traceback


@pytest.mark.parametrize(
    ("put", "use", "words"),
    [
        ("vars(library)['UNSEEN']['x'] = dict", "library.look_up('x')", "library.UNSEEN['x']"),
        ("library.LATE = 1", "__import__('library').LATE", "library.LATE"),
        ("library.Target.late = 1", "library.Target().late", "Target.late"),
        (
            "codecs.register(lambda name: codecs.lookup('rot13') if name == 'unsaid' else None)",
            "codecs.decode('a', 'unsaid')",
            "the codec 'unsaid'",
        ),
    ],
)
def test_error_for_want_of_a_registration_says_so(put: str, use: str, words: str, module_kernel: Kernel) -> None:
    # By a string, of which nobody knows what it does.
    module_kernel.execute(f"run = __import__('builtins').exec; run({put!r})")
    outcome = module_kernel.execute(f"notebook_launch(lambda: {use}, 2, output='none')")
    assert f"The notebook has {words}, and this rank has not" in outcome.traceback


@pytest.mark.parametrize(
    ("decorator", "use"),
    [("register_by_name", "library.TABLE['hidden'](None)"), ("patch_in", "library.Target().patched()")],
)
def test_definition_holds_whose_name_a_decorator_has_taken(decorator: str, use: str, module_kernel: Kernel) -> None:
    module_kernel.execute(f"@library.{decorator}\ndef hidden(self): return 'found'")
    outcome = module_kernel.execute(f"list(notebook_launch(lambda: {use}, 2, output='none'))")
    assert outcome.result == "['found', 'found']", outcome.traceback


def test_module_that_registers_at_its_import_is_imported_with_the_module_that_it_fills(kernel: Kernel) -> None:
    outcome = kernel.execute("notebook_launch(lambda: library.build('plug'), 2, output='none')[1]")
    assert outcome.result == "{}"
