"""Definitions of the notebook, and of modules beside it, reach the ranks as they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.first_cell import DEFINITIONS, FORKED
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

KERNEL_CODE = DEFINITIONS
KERNEL_FILES: dict[str, str] = {}


# Modules beside the notebook.


def test_ranks_run_an_edited_module_as_it_is_now(kernel: Kernel) -> None:
    first, second = (
        run_cell(kernel, code)
        for code in (
            """
            Path("helper.py").write_text("def value(): return 'old'")
            import helper
            from helper import value
            def by_module(): return helper.value()
            def by_name(): return value()
            def by_import():
                import helper
                return helper.value()
            session = Session(2).__enter__()
            print([session.run(f)[0] for f in (by_module, by_name, by_import)])
            """,
            """
            Path("helper.py").write_text("def value(): return 'edited'")
            print([notebook_launch(f, 2)[0] for f in (by_module, by_name, by_import)])
            print([session.run(f)[0] for f in (by_module, by_name, by_import)])
            session.close()
            print(helper.value())
            """,
        )
    )
    assert "['old', 'old', 'old']\n" in first.stdout
    assert "changed" not in first.stdout
    assert second.stdout.count("['edited', 'edited', 'edited']\n") == 2
    assert "helper.py changed since the kernel imported it: ranks run the file as it is now\n" in second.stdout
    assert second.stdout.count("helper.py changed: the ranks import the notebook's own modules again\n") == 1
    assert second.stdout.endswith("\nold\n")


def test_functions_changed_by_autoreload_reach_the_ranks(kernel: Kernel) -> None:
    setup = "%load_ext autoreload\n%autoreload 2\nPath('reloaded.py').write_text('VALUE = 1')\nimport reloaded"
    run_cell(kernel, setup)
    run_cell(kernel, "Path('reloaded.py').write_text('VALUE = 22')")
    values = evaluate(
        kernel,
        f"""
        def reload():
            return reloaded.VALUE
        [value for method in {FORKED!r} for value in notebook_launch(reload, 1, start_method=method)]
        """,
    )
    run_cell(kernel, "%autoreload 0")
    assert values == [22, 22]


# What the notebook defines.


DEFINED = """
import dataclasses, enum, functools, pickle, typing
@dataclasses.dataclass
class Options:
    rate: float = 0.5
class Colour(enum.Enum):
    RED = "red"
class Point(typing.NamedTuple):
    x: int
    y: int = 2
class Base:
    def name(self): return "base"
class Child(Base):
    def name(self): return super().name() + " of child"
counter = 0
def count():
    global counter
    counter += 1
    return counter
def factorial(n): return 1 if n == 0 else n * factorial(n - 1)
def is_even(n): return n == 0 or is_odd(n - 1)
def is_odd(n): return n != 0 and is_even(n - 1)
def shout(function):
    @functools.wraps(function)
    def wrapped(*args): return function(*args).upper()
    return wrapped
@shout
def greet(name): return f"hi {name}"
@functools.cache
def cached(x):
    return count()
def make_counter():
    number = 10
    def increment():
        nonlocal number
        number += 1
        return number
    return increment
closure = make_counter()
double = lambda x: 2 * x
async def wait_a_little(): return await asyncio.sleep(0, "awaited")
def use():
    # Returns values to compare, and objects whose classes the notebook knows.
    gathered = [None, None]
    dist.all_gather_object(gathered, (Options(dist.get_rank()), Colour.RED, Point(1)))
    count(), closure()
    values = (factorial(5), is_even(4), greet("you"), cached(1), cached(1), count(), counter, closure(),
              double(4), asyncio.run(wait_a_little()), gathered[1][0].rate, gathered[0][1] is Colour.RED,
              Child().name(), pickle.loads(pickle.dumps(Point(3))) == Point(3))
    return values, Options(0.1), Colour.RED, Point(5), Child(), Child
"""


@pytest.mark.parametrize("start_method", FORKED)
def test_definitions_of_the_notebook_reach_the_ranks(kernel: Kernel, start_method: str) -> None:
    run_cell(kernel, DEFINED)
    values, same, kernels = evaluate(
        kernel,
        f"""
        results = notebook_launch(use, 2, start_method={start_method!r})
        same = [(returned[0] == Options(0.1), returned[1] is Colour.RED, type(returned[2]) is Point,
                 isinstance(returned[3], Base), returned[4] is Child) for _, *returned in results]
        [values for values, *_ in results], same, (counter, closure())
        """,
    )
    assert values == [(120, True, "HI YOU", 2, 2, 3, 3, 12, 8, "awaited", 1, True, "base of child", True)] * 2
    assert same == [(True,) * 5] * 2
    # The ranks' counters are not the kernel's.
    assert kernels == (0, 11)


def test_every_kind_of_callable_can_be_launched_from_a_cell(kernel: Kernel) -> None:
    results = evaluate(
        kernel,
        """
        import functools
        class Adder:
            def __init__(self, by): self.by = by
            def __call__(self, x): return x + self.by
            def method(self, x): return x + 2 * self.by
            @classmethod
            def of_class(cls, x): return cls(3)(x)
            @staticmethod
            def of_nobody(x): return -x
        def power(x, exponent): return x ** exponent
        callables = [Adder(1), Adder(1).method, Adder.of_class, Adder.of_nobody, functools.partial(power, exponent=2),
                     lambda x: 7 * x, abs, float]
        [notebook_launch(f, 1, args=(5,), output="none")[0] for f in callables]
        """,
    )
    assert results == [6, 7, 8, -5, 25, 35, 5, 5.0]


OPERATOR = """
@torch.library.custom_op("mine::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return FACTOR * x
@scale.register_fake
def _(x): return torch.empty_like(x)
def keep(ctx, inputs, output): ctx.save_for_backward(*inputs)
def derive(ctx, grad): return grad * FACTOR
scale.register_autograd(derive, setup_context=keep)
@scale.register_vmap
def _(info, dims, x): return FACTOR * x, dims[0]
scale.register_autocast("cpu", torch.bfloat16)
overload = torch.ops.mine.scale.default
def use_operator():
    results = []
    for op in (scale, torch.ops.mine.scale, overload):
        x = torch.ones(2, requires_grad=True)
        op(x).sum().backward()
        results += [op(x).sum().item(), x.grad.sum().item()]
    with torch.autocast("cpu"):
        results.append(str(scale(torch.ones(1)).dtype))
    results.append(torch.vmap(scale)(torch.ones(2)).sum().item())
    return results, tuple(scale(torch.ones(3, device="meta")).shape), scale
"""


def test_operator_of_a_cell_reaches_the_ranks_and_is_redefined(kernel: Kernel) -> None:
    run_cell(kernel, f"FACTOR = 2\n{OPERATOR}\nsession = Session(2).__enter__()")
    for factor in (2, 3):
        found = evaluate(
            kernel,
            f"""
            FACTOR = {factor}
            {OPERATOR if factor == 3 else ""}
            found = [notebook_launch(use_operator, 2)[1], session.run(use_operator)[1], session.run(use_operator)[1]]
            [(*rest, op is scale) for *rest, op in found]
            """.replace("\n" + " " * 12, "\n"),
        )
        values = [2.0 * factor] * 6 + ["torch.bfloat16", 2.0 * factor]
        assert found == [(values, (3,), True)] * 3
    run_cell(kernel, "session.close()")
