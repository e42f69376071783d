"""Small models and data for tests of training, sessions of several numbers of ranks, and recorded warnings."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NUM_FEATURES = 3
# The file is asked, because an import of `FSDPModule` would bring torch's compiler into every process of pytest.
FULLY_SHARD = Path(torch.__file__).parent / "distributed/fsdp/_fully_shard/_fully_shard.py"
shards_on_cpus = pytest.mark.skipif(
    "def set_force_sum_reduction_for_comms" not in FULLY_SHARD.read_text(encoding="utf-8"),
    reason="fully_shard of this torch does not run on CPUs (2.6), or sums gradients there for their mean (2.7)",
)


class Sessions:
    """Ranks of several numbers, kept from test to test, until the stack closes."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._opened: dict[int, Session] = {}
        self._stack = stack

    def open(self, *numbers: int) -> None:
        """Start ranks of these numbers, but for those that are there."""
        new = [number for number in numbers if number not in self._opened]
        for number in new:
            session = Session(number, output="none", threads_per_process=1)
            self._opened[number] = self._stack.enter_context(session)
        for number in new:
            self._opened[number].run(_import_compiler)

    def __getitem__(self, num_processes: int) -> Session:
        """The session of so many ranks."""
        return self._opened[num_processes]

    def run(self, num_processes: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on so many ranks; a single one is this process."""
        if num_processes == 1 and 1 not in self._opened:
            return [function(*args)]
        return list(self._opened[num_processes].run(function, args=args))

    def error(self, num_processes: int, function: Callable[..., Any], *args: Any) -> str:
        """Return the error that all of these ranks raise; they keep their group, since the run itself succeeds."""

        def run() -> str:
            try:
                return f"nothing failed: {function(*args)!r}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        first, *others = self.run(num_processes, run)
        assert others == [first] * len(others)
        return str(first)


@pytest.fixture(scope="package")
def room_ranks() -> Iterator[Sessions]:
    """Ranks for all files of a folder whose `conftest.py` imports this fixture: torch's compiler takes 2 s of each."""
    with contextlib.ExitStack() as stack:
        yield Sessions(stack)


def sessions_fixture(*numbers: int, set_up: Callable[[], Any] | None = None) -> Any:
    """Return a fixture: sessions of these numbers of ranks, which are there before the first test of a file begins.

    Args:
        numbers: The numbers of ranks.
        set_up: Function that the ranks of the largest session run first.
    """

    @pytest.fixture(scope="module")
    def opened_sessions(room_ranks: Sessions) -> Sessions:
        room_ranks.open(*numbers)
        if set_up is not None:
            room_ranks.run(max(numbers), set_up)
        return room_ranks

    return opened_sessions


def session_fixture(number: int, set_up: Callable[[], Any] = os.getpid) -> Any:
    """Return a fixture: a session of so many ranks for all tests of a file.

    Args:
        number: The number of ranks.
        set_up: Function that the ranks run first. They start with it, so they are there before the first test begins.
    """

    @pytest.fixture(scope="module")
    def opened_session() -> Iterator[Session]:
        with Session(number, output="none") as session:
            session.run(set_up)
            yield session

    return opened_session


def make_replicas() -> None:
    """Make the groups of two replicas on two ranks each, whose sockets stay open as long as the ranks."""
    from notebook_launcher import Accelerator, ParallelismConfig

    Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))


@contextlib.contextmanager
def micro_batch(accelerator: Any, optimizer: Any, *models: Any) -> Iterator[Callable[..., None]]:
    """Train with what the block gives to the function that it gets, `accelerator.backward`."""
    with accelerator.accumulate(*models):
        yield accelerator.backward
        optimizer.step()
        optimizer.zero_grad()


def fit(accelerator: Any, model: Any, optimizer: Any, batches: Iterable[Any]) -> None:
    """Train with the mean squared error, in windows."""
    for inputs, targets in batches:
        with micro_batch(accelerator, optimizer, model) as backward:
            backward(torch.nn.functional.mse_loss(model(inputs), targets))


def whole(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return copies of tensors, gathered where they are sharded."""
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for one in tensors]


def _import_compiler() -> None:
    """Make the first optimizer, which imports torch's compiler: a rank stopped meanwhile would have half of it."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def recorded(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """Call a function; return its result, and the texts of all warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **options)
    return result, [str(warning.message) for warning in caught]


def make_model(seed: int = 0) -> torch.nn.Sequential:
    """A model with several parameters, the same on every call."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def one_weight() -> torch.nn.Linear:
    """A model whose gradient is the mean of its inputs."""
    linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(linear.weight)
    return linear


def numbers(count: int, batch_size: int = 1) -> Any:
    """A loader of the numbers from 1 on, for a model of one weight."""
    data: Any = torch.arange(1.0, count + 1, dtype=torch.float64)[:, None]
    return DataLoader(data, batch_size)


def make_data(num_samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; the last feature of an input is its index, so that samples can be told apart."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(num_samples, NUM_FEATURES, generator=generator)
    inputs[:, -1] = torch.arange(num_samples) / 64
    return inputs, torch.rand(num_samples, 1, generator=generator)


def full_gradient(state: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the mean loss over these samples, on one process."""
    model = make_model()
    model.load_state_dict(state)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
