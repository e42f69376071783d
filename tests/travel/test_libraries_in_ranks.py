"""What cells have registered in libraries, have replaced in them, and have set, holds in the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

KERNEL_FILES = {
    "library.py": """
import abc, functools, weakref
import config
from config import helper as imported_by_value
def lr(): return config.lr
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
    "config.py": """
import collections, types, weakref
lr, depth, unused, by_setattr, by_reset = 0.1, 2, 1, 1, 1
RATES = {"head": 0.1, "body": 0.2}
optim = types.SimpleNamespace(beta=0.9)
WEAK, NAMES, TAGS, LAYERS = weakref.WeakKeyDictionary(), ["a"], {"a"}, collections.OrderedDict(a=1)
class Options: first, second, scale = 1, 2, 1
class Other: scale = 1
class Outer:
    class Inner:
        rate = 1
        def forward(self): return "the library's"
class Net:
    def forward(self): return "the library's"
    @staticmethod
    def static(): return "the library's"
    @property
    def size(self): return "the library's"
def helper(x): return f"the library's {x}"
def wrapped(x): return f"the library's {x}"
def patched(x): return f"the library's {x}"
def partial(x, y=1): return x, y
_fused, _started = True, None
def set_fused(value):
    global _fused, _started
    _fused, _started = value, object()
""",
}
KERNEL_CODE = """
import codecs, collections.abc, copyreg, functools, logging, os, sys, warnings
from unittest import mock
import pandas, torch, torch.nn as nn, torch.nn.functional as F
import config, library, plug
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

def lacking():
    is_there = {
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
    return [name for name, found in is_there.items() if not found]

def values():
    from torch.backends.cuda import matmul
    torch.manual_seed(0)
    net = config.Net()
    return {
        "function": F.gelu(torch.ones(1)).item(),
        "identity": F.gelu is globals().get("my_gelu"),
        "by value": library.imported_by_value(1),
        "method": nn.Linear(1, 1)(torch.ones(1)).item(),
        "helper": config.helper(1),
        "wrapped": config.wrapped(1),
        "partial": config.partial(1),
        "subclass": (net.forward(), net.static(), net.size, type(net).__mro__[-2].__qualname__),
        "values": (config.lr, library.lr(), config.RATES, config.optim.beta, config.depth, config.by_setattr),
        "deleted": hasattr(config, "unused"),
        "contents": (config.NAMES, config.TAGS, dict(config.LAYERS), list(config.WEAK.values())),
        "by computed names": (config.Options.first, config.Options.second),
        "of a loop": (config.Options.scale, config.Other.scale),
        "nested class": (config.Outer.Inner().forward(), config.Outer.Inner.rate),
        "mock": config.patched(1),
        "in a loop": (repr(nn.ReLU()), repr(nn.Tanh())),
        "by an argument": (repr(nn.Softsign()), repr(nn.Tanhshrink())),
        "by a setter": config._fused,
        "settings": matmul.allow_bf16_reduced_precision_reduction,
    }

def look(): return lacking(), values()
before = values()
"""
REPLACE = """
originals = (F.gelu, nn.Linear.forward, config.helper, config.wrapped, config.partial, config.Net, nn.ReLU.extra_repr)
inner_forward = config.Outer.Inner.forward
def my_gelu(x): return x * 0 + 5
F.gelu = my_gelu
nn.Linear.forward = lambda self, x: x * 7
def my_helper(x): return "mine and " + originals[2](x)
config.helper = my_helper
@functools.wraps(config.wrapped)
def my_wrapped(x): return "mine and " + my_wrapped.__wrapped__(x)
config.wrapped = my_wrapped
config.partial = functools.partial(config.partial, y=2)
class MyNet(config.Net):
    def forward(self): return "mine and " + super().forward()
    static = staticmethod(lambda: "mine")
    size = property(lambda self: "mine")
config.Net = MyNet
config.lr, config.RATES["body"] = 0.01, 2
config.optim.beta = 0.5
for name in config.RATES:
    config.RATES[name] = 9
config.NAMES += ["b"]
config.TAGS.update("b")
config.LAYERS.setdefault("b", 2)
class Key: pass
config.WEAK[Key] = 4
for name, value in {"first": 7, "second": 8}.items():
    setattr(config.Options, name, value)
for cls in (config.Options, config.Other):
    cls.scale = 6
config.Outer.Inner.forward, config.Outer.Inner.rate = (lambda self: "mine"), 5
def set_up():
    import config as alias
    alias.depth = 7
set_up()
setattr(config, "by_" + "setattr", 1)
setattr(config, "by_setattr", 3)
del config.unused
config.set_fused(False)
patch = mock.patch.object(config, "patched", lambda x: "mine").start()
def my_repr(self): return "mine"
for layer in (nn.ReLU, nn.Tanh):
    layer.extra_repr = my_repr
def put_outer(cls): cls.extra_repr = my_repr
def put_inner(cls):
    def inner(self): return "mine"
    cls.extra_repr = inner
put_outer(nn.Softsign); put_inner(nn.Tanhshrink)
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
after = values()
"""
PUT_BACK = """
mock.patch.stopall()
config.set_fused(True)
F.gelu, nn.Linear.forward, config.helper, config.wrapped, config.partial, config.Net, nn.ReLU.extra_repr = originals
del nn.Tanh.extra_repr, nn.Softsign.extra_repr, nn.Tanhshrink.extra_repr
config.lr, config.RATES["head"], config.RATES["body"], config.optim.beta = 0.1, 0.1, 0.2, 0.9
config.NAMES.remove("b"); config.TAGS.discard("b"); config.LAYERS.pop("b"); config.WEAK.clear()
config.Options.first, config.Options.second, config.Options.scale, config.Other.scale = 1, 2, 1, 1
config.Outer.Inner.forward, config.Outer.Inner.rate = inner_forward, 1
config.depth, config.by_setattr, config.unused = 2, 1, 1
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
del my_gelu
"""
MANNERS = """
def manners():
    import found_by_relative_entry
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("one", UserWarning)
        warnings.warn("two", FutureWarning)
    levels = [logging.getLogger(name).getEffectiveLevel() for name in (None, "own", "own.inner")]
    return [str(w.message) for w in caught], levels, found_by_relative_entry.VALUE
def in_ranks(**options):
    return notebook_launch(manners, 2, **options)[1]
os.makedirs("lib")
os.makedirs("elsewhere")
os.makedirs("spread")
open("lib/found_by_relative_entry.py", "w").write("VALUE = 1")
open("beside.py", "w").write("VALUE = 'beside'")
open("spread/part.py", "w").write("VALUE = 'part of a namespace package'")
open("hidden.py", "w").write("VALUE = 'imported before'")
open("elsewhere/hidden.py", "w").write("VALUE = 'never imported'")
open("elsewhere/late.py", "w").write("VALUE = 'late'")
sys.path.append("lib")
import found_by_relative_entry, beside, spread.part, hidden
def where(): return [module.VALUE for module in (beside, spread.part, hidden, late)]
"""


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


def test_work_without_a_registration_carries_nothing(module_kernel: Kernel) -> None:
    code = (
        "from notebook_launcher.travel.registrations import find_registrations\n"
        "class Net(torch.nn.Module):\n    def forward(self, x): return x\n"
        "def collate(rows): return torch.stack(rows)\n"
        "def hook(*_): pass\n"
        "net = torch.nn.Sequential(Net()); net.register_forward_hook(hook)\n"
        "loader = torch.utils.data.DataLoader(torch.zeros(4, 1), collate_fn=collate); next(iter(loader))\n"
        "own = {'net': Net}\n"
        "find_registrations([Net, collate, hook, look])[0]"
    )
    assert evaluate(module_kernel, code) == []


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
    assert evaluate(module_kernel, f"notebook_launch(lambda: {use}, 2, output='none')[:]") == ["found", "found"]


def test_module_that_registers_at_its_import_is_imported_with_the_module_that_it_fills(kernel: Kernel) -> None:
    assert evaluate(kernel, "notebook_launch(lambda: library.build('plug'), 2, output='none')[1]") == {}


@pytest.fixture(scope="module")
def replaced(module_kernel: Kernel) -> Iterator[Kernel]:
    run_cell(module_kernel, "session = Session(2)\nassert session.run(values)[:] == [before, before]")
    run_cell(module_kernel, REPLACE)
    yield module_kernel
    run_cell(module_kernel, PUT_BACK + "assert values() == before, values()")
    run_cell(module_kernel, "assert session.run(values)[:] == [before] * 2, session.run(values)[0]\nsession.close()")
    run_cell(module_kernel, "assert notebook_launch(values, 2)[:] == [before] * 2")


def test_what_is_replaced_differs_everywhere_from_the_original(replaced: Kernel) -> None:
    assert evaluate(replaced, "[name for name in before if before[name] == after[name]]") == ["by value"]


@pytest.mark.parametrize(
    "launch",
    [
        "notebook_launch(look, 2)",
        "notebook_launch(look, 2, start_method='fork')",
        "notebook_launch(look, 1, engine=engine)",
        "notebook_launch(look, 2, detached=True)",
    ],
    ids=["forkserver", "fork", "engine", "detached"],
)
def test_ranks_have_what_cells_have_registered_and_replaced(replaced: Kernel, launch: str) -> None:
    run_cell(replaced, f"with Commands([[]]) as engine: results = {launch}")
    results, expected = evaluate(replaced, "results[:], after")
    assert results == [([], expected)] * len(results) != []


def test_session_follows_what_cells_replace_register_and_remove(replaced: Kernel) -> None:
    after = evaluate(replaced, "after")
    assert evaluate(replaced, "[session.run(look)[0] for _ in range(2)]") == [([], after)] * 2
    run_cell(replaced, "kept = library.TABLE.pop('a'); library.LIST.clear(); library.SET.clear()")
    assert evaluate(replaced, "session.run(look)[0]") == (["dict", "list", "set"], after)
    run_cell(replaced, "library.register('a', A); library.add(B)")
    assert evaluate(replaced, "session.run(look)[0]") == ([], after)


def test_method_of_a_table_is_called_before_a_launch(module_kernel: Kernel) -> None:
    run_cell(module_kernel, "table, array = pandas.DataFrame({'a': [1, 2]}), torch.ones(2).numpy()")
    run_cell(module_kernel, "table.merge(table); array.dot(array)")
    assert evaluate(module_kernel, "notebook_launch(lambda: 1, 2, output='none')[:]") == [1, 1]


def test_manners_of_the_kernel_hold_in_the_ranks(module_kernel: Kernel) -> None:
    run_cell(module_kernel, MANNERS + "polite = Session(2)\nos.chdir('elsewhere')")
    usual = evaluate(module_kernel, "in_ranks()")
    assert usual == (["one", "two"], [30, 30, 30], 1)
    code = "warnings.filterwarnings('ignore', category=FutureWarning)\nlogging.getLogger('own').setLevel('DEBUG')"
    run_cell(module_kernel, code)
    ways = "in_ranks(), in_ranks(start_method='fork'), polite.run(manners)[1]"
    assert evaluate(module_kernel, f"manners(), {ways}") == ((["one"], [30, 10, 10], 1),) * 4
    run_cell(module_kernel, "del warnings.filters[0]\nlogging.getLogger('own').setLevel(0)")
    assert evaluate(module_kernel, ways) == (usual,) * 3
    code = "[in_ranks(env={'PYTHONWARNINGS': 'ignore'}, start_method=way)[0] for way in ('forkserver', 'fork')]"
    assert evaluate(module_kernel, code) == [[], []]
    # After os.chdir the entry "" of sys.path means another folder; the kernel has modules of both.
    run_cell(module_kernel, "import late")
    ways = "where(), *(notebook_launch(where, 2, start_method=way)[1] for way in ('forkserver', 'fork'))"
    expected = ["beside", "part of a namespace package", "imported before", "late"]
    assert evaluate(module_kernel, f"{ways}, polite.run(where)[1]") == (expected,) * 4
    run_cell(module_kernel, "polite.close()\nos.chdir('..')")
