"""What cells have replaced in modules and classes of libraries holds in the ranks, as in forks of the kernel."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

KERNEL_FILES = {
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
    "library.py": """
import config
from config import helper as imported_by_value
def lr(): return config.lr
""",
}
KERNEL_CODE = """
import functools
from unittest import mock
import config, library
import torch, torch.nn as nn, torch.nn.functional as F
from notebook_launcher import Commands, Session, launch, notebook_launch

def look():
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
before = look()
engine = Commands([[]])
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
after = look()
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
WAYS = {
    "forkserver": "notebook_launch(look, 2)",
    "fork": "notebook_launch(look, 2, start_method='fork')",
    "engine": "notebook_launch(look, 1, engine=engine)\nengine.close()",
    "detached": "notebook_launch(look, 2, detached=True)",
}


@pytest.fixture(scope="module")
def replaced(module_kernel: Kernel) -> Iterator[Kernel]:
    run_cell(module_kernel, "session = Session(2)\nassert session.run(look)[:] == [before, before]")
    run_cell(module_kernel, REPLACE)
    yield module_kernel
    run_cell(module_kernel, PUT_BACK + "assert look() == before, look()")
    run_cell(module_kernel, "assert session.run(look)[:] == [before] * 2, session.run(look)[0]\nsession.close()")
    run_cell(module_kernel, "assert notebook_launch(look, 2)[:] == [before] * 2")


def test_what_is_replaced_differs_everywhere_from_the_original(replaced: Kernel) -> None:
    assert evaluate(replaced, "[name for name in before if before[name] == after[name]]") == ["by value"]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_have_what_cells_have_replaced(replaced: Kernel, way: str) -> None:
    outcome = run_cell(replaced, f"results = {WAYS[way]}\nprint([result for result in results])\nafter")
    of_ranks = ast.literal_eval(outcome.stdout.splitlines()[-1])
    assert of_ranks == [ast.literal_eval(outcome.result or "")] * len(of_ranks)


def test_ranks_of_a_session_follow_the_kernel(replaced: Kernel) -> None:
    assert evaluate(replaced, "[session.run(look)[0] == after for _ in range(2)]") == [True, True]


def test_method_of_a_table_is_called_before_a_launch(module_kernel: Kernel) -> None:
    run_cell(module_kernel, "import numpy, pandas\ntable, array = pandas.DataFrame({'a': [1, 2]}), numpy.ones(2)")
    run_cell(module_kernel, "table.merge(table); array.dot(array)")
    assert evaluate(module_kernel, "notebook_launch(lambda: 1, 2, output='none')[:]") == [1, 1]
