"""The end of an exchange beside a forward in unusual cases: ranks that end or fork, and settings that it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from notebook_launcher import Accelerator, DistributedDataParallelKwargs, RankFailedError, Session, report
from notebook_launcher.training.accumulation.members.ddp import wrap
from tests.support.toy_training import make_model, shards_on_cpus
from tests.support.waiting import until


def prepare(**options: Any) -> tuple[Accelerator, Any, Any]:
    handler = DistributedDataParallelKwargs(bucket_cap_mb=1e-5, overlap_with_forward=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], check_ranks=False, **options)
    model = make_model()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def update(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_one_process_has_nothing_to_exchange() -> None:
    accelerator, model, optimizer = prepare()
    update(accelerator, model, optimizer)
    update(accelerator, model, optimizer)
    accelerator.finish_exchange()
    assert all(parameter.numel() for parameter in model.parameters())
    assert not isinstance(model, torch.nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
def test_power_sgd_is_refused(hook: str) -> None:
    message = f"comm_hook='{hook}' with overlap_with_forward=True: PowerSGD reduces .* Use 'fp16', 'bf16' or 'no', or"
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelKwargs(comm_hook=hook, overlap_with_forward=True)


def test_gpus_are_refused() -> None:
    handler = DistributedDataParallelKwargs(overlap_with_forward=True)
    message = r"overlap_with_forward=True is for ranks on CPUs, and Sequential is on cuda:0: .* Leave it out"
    with pytest.raises(ValueError, match=message):
        wrap(make_model(), torch.device("cuda", 0), handler)


def test_handler_that_comes_late_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = DistributedDataParallelKwargs(bucket_cap_mb=1)
    with pytest.raises(
        ValueError, match=r"overlap_with_forward=True came after the Accelerator was made, .* to the const"
    ):
        accelerator.ddp_handler = DistributedDataParallelKwargs(overlap_with_forward=True)


@shards_on_cpus
def test_sharded_models_are_refused() -> None:
    def shard() -> None:
        from notebook_launcher import FullyShardedDataParallelPlugin

        prepare(fsdp_plugin=FullyShardedDataParallelPlugin())

    message = "overlap_with_forward=True is for whole models, .* FSDP2 reduces the Sequential, .* or do not shard"
    with Session(2, output="none") as session, pytest.raises(ValueError, match=message):
        session.run(shard)


def test_rank_that_is_lost_during_the_exchange_is_named() -> None:
    def train() -> None:
        accelerator, model, optimizer = prepare()
        update(accelerator, model, optimizer)
        if accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        update(accelerator, model, optimizer)

    with Session(2, output="none") as session, pytest.raises(RankFailedError, match="rank 1 of 2 was killed"):
        session.run(train)


@pytest.mark.slow
def test_interrupts_in_the_middle_of_exchanges_cost_no_rank_and_no_digit() -> None:
    def train(num_updates: int) -> list[float]:
        torch.manual_seed(0)
        accelerator, model, optimizer = prepare()
        for number in range(num_updates):
            update(accelerator, model, optimizer)
            report(number=number)
        accelerator.finish_exchange()
        return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]

    with Session(2, output="none") as session:
        ranks, expected = list(session.run(os.getpid)), list(session.run(train, args=(20,)))
        for number in range(5):
            run = session.launch(train, args=(sys.maxsize,))
            until(lambda: len(run.metrics) > 5 * number, run)  # noqa: B023 - called at once
            run.stop()
            assert run.state == "stopped"
            assert list(session.run(train, args=(20,))) == expected
        assert list(session.run(os.getpid)) == ranks


def test_failed_exchange_raises_and_shows_the_weights() -> None:
    def train() -> tuple[str, list[int]]:
        accelerator, model, optimizer = prepare()
        update(accelerator, model, optimizer)
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        # A future that fails as another rank's death would have it fail.
        broken: Any = torch.futures.Future()
        broken.set_exception(RuntimeError("Connection closed by peer"))
        model.exchange._buckets[0]._reduction = broken
        optimizer.step()
        with pytest.raises(RuntimeError) as caught:
            accelerator.finish_exchange()
        accelerator.finish_exchange()
        return str(caught.value), [parameter.numel() for parameter in model.trained]

    with Session(2, output="none") as session:
        for message, sizes in session.run(train):
            assert message.startswith("the exchange of gradients of Sequential, which went on after its backward, has ")
            assert "Connection closed by peer" in message
            assert "load a checkpoint" in message
            assert sizes == [12, 4, 4, 1]


def test_forked_process_has_no_part_in_the_exchange() -> None:
    def train() -> str:
        accelerator, model, optimizer = prepare()
        update(accelerator, model, optimizer)
        update(accelerator, model, optimizer)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                model.state_dict()
            except RuntimeError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        message = os.read(read, 1000).decode()
        os.close(read)
        os.close(write)
        return message

    with Session(2, output="none") as session:
        for message in session.run(train):
            assert message.startswith("this process was forked while the gradients of Sequential were exchanged")
            assert "call accelerator.finish_exchange() before you start processes that use the model" in message


SCRIPT = """
import sys

import torch

from tests.training.accumulation.members.test_exchange_ends import prepare, update

accelerator, model, optimizer = prepare()
for _ in range(3):
    update(accelerator, model, optimizer)
if accelerator.process_index == 0:
    sys.stdin.readline()
    print(sum(float(value.sum()) for value in model.state_dict().values()))
"""


@pytest.mark.slow
def test_script_that_ends_at_once_has_sent_its_part(free_port: int) -> None:
    environ = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **options
        )
        for rank in range(2)
    )
    second.communicate()
    out, _ = first.communicate("\n")
    assert (first.returncode, second.returncode) == (0, 0)
    assert float(out)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
