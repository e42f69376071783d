"""The states of the random number generators: ranks begin with the kernel's, as a fork of the kernel would.

So `torch.manual_seed(42)` in a cell makes a launch repeatable, and a random split is the same on all ranks.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import random
import sys
import types
from array import array
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging.messages import RandomStates
from notebook_launcher.travel.unpicklable import Part, parts_of_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


VERSION = 3
"""The version of Python's generator whose states travel, the same in all releases of Python 3."""
LARGEST_TYPED = 2**32 - 1
"""A larger seed of torch was drawn by torch itself, and tells a person nothing."""


def read_random_states() -> RandomStates:
    """Return this process's states, which stay as they are; nothing is imported."""
    _, words, normal = random.getstate()
    torch_state, torch_seed, cuda = _read_torch()
    return RandomStates(
        python=array("I", words).tobytes(),
        python_normal=normal,
        numpy=_read_numpy(),
        torch=torch_state,
        torch_seed=torch_seed,
        cuda=cuda,
    )


def _read_numpy() -> tuple[bytes, int, int, float] | None:
    numpy_random: Any = sys.modules.get("numpy.random")
    # An attribute is missing while NumPy is being imported; a user may have put another kind of generator in place.
    with contextlib.suppress(Exception):
        state = numpy_random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            twister = state["state"]
            return twister["key"].tobytes(), int(twister["pos"]), int(state["has_gauss"]), float(state["gauss"])
    return None


def _read_torch() -> tuple[bytes | None, int | None, bytes | None]:
    torch: Any = sys.modules.get("torch")
    state = number = cuda = None
    with contextlib.suppress(Exception):  # It is being imported, or a graph is being captured.
        state, number = _bytes_of(torch.default_generator.get_state()), torch.default_generator.initial_seed()
        if torch.cuda.is_initialized():
            cuda = _bytes_of(torch.cuda.get_rng_state())
    return state, number, cuda


def _bytes_of(state: Any) -> bytes:
    # 1 µs, and `bytes(state)` 300. NumPy, by which it could be done, may be missing.
    return ctypes.string_at(state.data_ptr(), state.numel())


def set_random_states(states: RandomStates, *, use_gpu: bool) -> None:
    """Give this process these states; a generator of which the states know nothing is seeded by Python's state."""
    number = _number_of(states.python)
    random.setstate((VERSION, tuple(array("I", states.python)), states.python_normal))
    if (numpy := sys.modules.get("numpy")) is not None:
        if states.numpy is None:
            numpy.random.seed(number % 2**32)
        else:
            key, position, has_normal, normal = states.numpy
            numpy.random.set_state(("MT19937", numpy.frombuffer(key, numpy.uint32), position, has_normal, normal))
    if (torch := sys.modules.get("torch")) is not None:
        _seed_torch(torch, number if states.torch_seed is None else states.torch_seed, use_gpu=use_gpu)
        if states.torch is not None:
            torch.default_generator.set_state(_tensor_of(torch, states.torch))
        if states.cuda is not None and use_gpu:
            torch.cuda.set_rng_state(_tensor_of(torch, states.cuda))


def _number_of(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8], "little")


def _tensor_of(torch: Any, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _seed_all(number: int, *, use_gpu: bool) -> None:
    number %= 2**32
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        _seed_torch(torch, number, use_gpu=use_gpu)


def _seed_torch(torch: Any, number: int, *, use_gpu: bool) -> None:
    # `torch.manual_seed` records a formatted stack for each kind of device, which takes 4 ms.
    (torch.manual_seed if use_gpu else torch.default_generator.manual_seed)(number)


def begin_random(start: int | RandomStates, rank_seeds: str | None, rank: int, *, use_gpu: bool) -> None:
    """Seed a rank, or give it the kernel's states; with `"apart"`, a seed made of these and the rank."""
    if isinstance(start, int):
        _seed_all(start + (rank if rank_seeds == "apart" else 0), use_gpu=use_gpu)
    elif rank_seeds == "apart":
        _seed_all(_number_of(start.torch or b"", start.python) + rank, use_gpu=use_gpu)
    else:
        set_random_states(start, use_gpu=use_gpu)


def describe_random(start: int | RandomStates) -> str:
    """Return a clause about what the ranks begin with, for the summary of a launch."""
    if isinstance(start, int):
        return f"seed {start}"
    number = start.torch_seed
    known = f" (seed {number})" if number is not None and number <= LARGEST_TYPED else ""
    return f"random state of the kernel{known}"


def encode_states(states: RandomStates) -> dict[str, Any]:
    """Return the states as JSON has them."""
    plain = dataclasses.asdict(states)
    texts = {name: base64.b64encode(value).decode() for name, value in plain.items() if isinstance(value, bytes)}
    numpy = None if states.numpy is None else [base64.b64encode(states.numpy[0]).decode(), *states.numpy[1:]]
    return {**plain, **texts, "numpy": numpy}


def decode_states(plain: dict[str, Any]) -> RandomStates:
    """Return the states that `encode_states` has written."""
    names = ("python", "torch", "cuda")
    decoded = {name: None if plain[name] is None else base64.b64decode(plain[name]) for name in names}
    numpy = plain["numpy"] and (base64.b64decode(plain["numpy"][0]), *plain["numpy"][1:])
    return RandomStates(**{**plain, **decoded, "numpy": numpy})


# --------------------------------------------------------------------------------------------------------------------
# Objects that travel with a call as copies, of which a user should know: random number generators, Optuna's trials.


OWN_GENERATORS = {
    ("torch", "Generator"): "torch.Generator().manual_seed(torch.initial_seed() + dist.get_rank())",
    ("numpy.random", "Generator"): "numpy.random.default_rng(torch.initial_seed() + dist.get_rank())",
    ("numpy.random", "RandomState"): "numpy.random.RandomState((torch.initial_seed() + dist.get_rank()) % 2**32)",
    ("random", "Random"): "random.Random(torch.initial_seed() + dist.get_rank())",
}
"""By class: the expression for a generator of the rank's own."""
OPTUNA = {"trial": "optuna.trial", "study": "optuna.study"}
"""By what Optuna calls it: the module with its class, `Trial` or `Study`."""


def describe_copies(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, num_ranks: int) -> str:
    """Return the notices about copies that travel with a call to so many ranks; nothing if there are none."""
    lines = []
    # Generators in other objects are left out, because the generator of a data loader must be equal on all ranks.
    if num_ranks > 1 and (found := _find(function, args, kwargs, lambda value: _kind(value) is not None)):
        ways = dict.fromkeys(OWN_GENERATORS[kind] for each in found.values() if (kind := _kind(each)) is not None)
        lines.append(
            f"{', '.join(found)}: every rank gets an equal copy of this random number generator, so all ranks draw the "
            "same numbers. That is right for shuffling a loader. For numbers of a rank's own, such as noise or "
            f"augmentation, make it in the function: {' or '.join(ways)}"
        )
    studies = _find(function, args, kwargs, _kept_in_memory) if "optuna" in sys.modules else {}
    for name, value in studies.items():
        lines.append(
            f"{name}: ranks get a copy of this {_kept_in_memory(value)}, whose study is in the kernel's memory: what "
            "they report, suggest or set by it is lost. Call it here, with what the ranks return, or keep the study in "
            "a file and call it on rank 0 alone: optuna.create_study(storage='sqlite:///study.db')"
        )
    return "\n".join(lines)


def _kept_in_memory(value: Any) -> str:
    """Return "trial" or "study" for one of Optuna whose study no file or database keeps; empty for another object."""
    for kind, module in OPTUNA.items():
        cls = getattr(sys.modules.get(module), kind.title(), None)
        if cls is not None and isinstance(value, cls):
            study = value if kind == "study" else getattr(value, "study", None)
            return kind if type(getattr(study, "_storage", None)).__name__ == "InMemoryStorage" else ""
    return ""


def _find(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Callable[[Any], object]
) -> dict[str, Any]:
    """Return the objects that a call brings along and for which `wanted` is true, by name; also in plain containers."""
    while isinstance(function, functools.partial):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    names = {f"args[{at}]": value for at, value in enumerate(args)} | dict(kwargs)
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        captured = parts_of_function(Part(function), function)
        names = {**{part.expression: part.value for part in captured}, **names}
    return {name: value for root, held in names.items() for name, value in _inside(root, held) if wanted(value)}


def _inside(root: str, held: Any) -> Iterator[tuple[str, Any]]:
    yield root, held
    if type(held) in (list, tuple):
        yield from ((f"{root}[{at}]", value) for at, value in enumerate(held))
    elif type(held) is dict:
        yield from ((f"{root}[{key!r}]", value) for key, value in held.items())


def _kind(value: Any) -> tuple[str, str] | None:
    if isinstance(value, type):
        return None
    for module, name in OWN_GENERATORS:
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and isinstance(value, cls) and type(value).__name__ != "SystemRandom":
            return module, name
    return None
