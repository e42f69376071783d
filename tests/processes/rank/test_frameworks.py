"""Other people's code runs in ranks unchanged: what was written for torchrun, Accelerate, Lightning or one process.

None of the functions here knows the launcher. Numbers are compared with what one process computes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.kernel.run.commands import OTHERS
from tests.support.first_cell import FORKED, START_METHODS
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kernels import Kernel
from tests.support.linear_cell import DEFINITIONS

SCRIPT = """
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    total = torch.ones(1) * args.scale * (int(os.environ["LOCAL_RANK"]) + 1)
    dist.all_reduce(total)
    print("total", total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

KERNEL_CODE = DEFINITIONS
KERNEL_FILES = {"script.py": SCRIPT}


# Hugging Face Accelerate.


@pytest.mark.slow
@pytest.mark.parametrize("start_method", FORKED)
def test_accelerator_trains_on_every_rank(kernel: Kernel, start_method: str) -> None:
    results = evaluate(
        kernel,
        f"""
        def train():
            from accelerate import Accelerator
            accelerator = Accelerator(gradient_accumulation_steps=2)
            model = linear()
            model, optimizer, loader = accelerator.prepare(
                model, sgd(model), torch.utils.data.DataLoader(rows(16), batch_size=2))
            seen = []
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                seen += accelerator.gather(x).flatten().tolist()
            accelerator.wait_for_everyone()
            weight = accelerator.unwrap_model(model).weight.item()
            return accelerator.num_processes, accelerator.process_index, type(model).__name__, len(loader), seen, weight
        list(notebook_launch(train, 2, start_method={start_method!r}))
        """,
    )
    # Two updates, each over two micro-batches of two ranks: the means of rows 0 to 7 and 8 to 15.
    weight = -0.5 * 3.5 - 0.5 * 11.5
    seen = [float(row) for row in range(16)]
    assert results == [(2, rank, "DistributedDataParallel", 4, seen, weight) for rank in range(2)]


def test_each_call_makes_an_accelerator_with_settings_of_its_own_or_of_the_launch(kernel: Kernel) -> None:
    """Accelerate's state is the process's: the first Accelerator would decide for those of all later calls."""
    found, adopted = evaluate(
        kernel,
        """
        def settings(**options):
            from accelerate import Accelerator
            accelerator = Accelerator(**options)
            globals().setdefault("kept", accelerator)
            return [(one.mixed_precision, one.gradient_accumulation_steps) for one in (accelerator, kept)]
        with Session(2, devices="cpu") as session:
            options = [{"mixed_precision": "bf16", "gradient_accumulation_steps": 2}, {}, {"mixed_precision": "fp16"}]
            found = [session.run(settings, kwargs=own)[1] for own in options]
        adopted = notebook_launch(settings, 1, devices="cpu", mixed_precision="bf16", gradient_accumulation_steps=4)
        found, adopted[0][0]
        """,
    )
    assert found == [[mine, ("bf16", 2)] for mine in [("bf16", 2), ("no", 1), ("fp16", 1)]]
    assert adopted == ("bf16", 4)


MAKERS = {
    "Hugging Face's Accelerator": "from accelerate import Accelerator; Accelerator()",
    "transformers' Trainer": "from transformers import Trainer, TrainingArguments as Arguments\n"
    "    Trainer(linear(), Arguments('.', use_cpu=True, report_to=[], disable_tqdm=True))",
    "Lightning's Trainer": "from pytorch_lightning import Trainer\n"
    "    Trainer(accelerator='cpu', devices=2, logger=False, enable_checkpointing=False)",
    "Lightning's Fabric": "from lightning_fabric import Fabric; Fabric(accelerator='cpu', devices=2)",
}
ADVICE = {
    "Hugging Face's Accelerator": "max_grad_norm=0.5 had no effect: Hugging Face's Accelerator has its own settings. "
    "Write accelerator.clip_grad_norm_(model.parameters(), 0.5) before each step",
    "transformers' Trainer": "gradient_accumulation_steps=4, max_grad_norm=0.5 had no effect: transformers' Trainer "
    "has its own settings. Write TrainingArguments(gradient_accumulation_steps=4, max_grad_norm=0.5)",
    "Lightning's Trainer": "mixed_precision='bf16', gradient_accumulation_steps=4, max_grad_norm=0.5 had no effect: "
    "Lightning's Trainer has its own settings. "
    'Write Trainer(precision="bf16-mixed", accumulate_grad_batches=4, gradient_clip_val=0.5)',
    "Lightning's Fabric": "mixed_precision='bf16', gradient_accumulation_steps=4, max_grad_norm=0.5 had no effect: "
    'Lightning\'s Fabric has its own settings. Write Fabric(precision="bf16-mixed"), ',
}


@pytest.mark.parametrize(
    "maker", [next(iter(MAKERS)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*MAKERS][1:])]
)
def test_settings_that_another_trainer_does_not_take_are_named_with_what_to_write(kernel: Kernel, maker: str) -> None:
    """Once, and as soon as the trainer is made, in a session, too."""
    options = "mixed_precision='bf16', gradient_accumulation_steps=4, max_grad_norm=0.5"
    make = f"def make():\n    {MAKERS[maker]}\n"
    run = run_cell(kernel, f"{make}notebook_launch(make, 2, devices='cpu', {options});")
    in_session = run_cell(
        kernel, f"with Session(2, devices='cpu', {options}) as session:\n    session.run(make)\n    session.run(make)"
    )
    for outcome in (run, in_session):
        assert outcome.stdout.count("had no effect") == 1, outcome.stdout
        assert ADVICE[maker] in outcome.stdout


ASKED = """
def train():
    make()
    from notebook_launcher import track
    for _ in track(range(10**9)):
        time.sleep(0.001)
run = launch(train, 2, devices="cpu", output="none")
while not run.snapshot().ranks[0].done and run.state != "failed":
    time.sleep(0.01)
for ask in (run.save, run.pause, run.profile, lambda: run.set(lr=0.1)):
    try:
        ask()
    except CallOrderError as error:
        print(error)
run.stop()
"""


@pytest.mark.parametrize(
    "maker", [next(iter(MAKERS)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*MAKERS][1:])]
)
def test_requests_to_a_run_name_the_trainer_that_makes_its_updates(kernel: Kernel, maker: str) -> None:
    """Those without a callback of ours take none, and the library's way to save and to change is named."""
    asked = run_cell(kernel, f"def make():\n    {MAKERS[maker]}\n{ASKED}").stdout.splitlines()
    if maker in ("transformers' Trainer", "Lightning's Trainer"):
        assert [line.count(f"{maker} has made no update in this run yet") for line in asked[1:]] == [1] * 4, asked
        off = "import os; os.environ['NOTEBOOK_LAUNCHER_CALLBACKS'] = 'off'"
        asked = run_cell(kernel, f"def make():\n    {off}\n    {MAKERS[maker]}\n{ASKED}").stdout.splitlines()
    whose = f"{maker} makes the updates here, and it takes no requests"
    assert [line.count(whose) for line in asked] == [1] * 4, asked
    save, change = OTHERS[maker]
    assert [(save in line, change in line) for line in asked] == [
        (True, False),
        (False, True),
        (False, False),
        (False, True),
    ]


def test_partial_state_finds_the_ranks_however_it_is_made(kernel: Kernel) -> None:
    results = evaluate(
        kernel,
        """
        def states():
            from datetime import timedelta
            from accelerate import PartialState
            from accelerate.state import AcceleratorState
            with PartialState(cpu=True).split_between_processes([1, 2, 3, 4]) as share:
                pass
            # As transformers' TrainingArguments does.
            AcceleratorState._reset_state(reset_partial_state=True)
            again = PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=1800))
            again.wait_for_everyone()
            return share, again.num_processes, again.is_main_process
        list(notebook_launch(states, 2))
        """,
    )
    assert results == [([1, 2], 2, True), ([3, 4], 2, False)]


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_kernels_own_accelerator_does_not_leave_each_rank_alone(kernel: Kernel, start_method: str) -> None:
    results, kernels = evaluate(
        kernel,
        f"""
        from accelerate import Accelerator
        mine = Accelerator(cpu=True)
        def count():
            return Accelerator().num_processes
        list(notebook_launch(count, 2, start_method={start_method!r})), (mine.num_processes, mine.state.num_processes)
        """,
    )
    assert results == [2, 2]
    assert kernels == (1, 1)


# Lightning.


@pytest.mark.slow
def test_lightning_trainer_fits_on_every_rank(kernel: Kernel, tmp_path: Path) -> None:
    results = evaluate(
        kernel,
        f"""
        def train():
            import pytorch_lightning as pl
            class Module(pl.LightningModule):
                def __init__(self):
                    super().__init__()
                    self.model = linear()
                def training_step(self, batch, _):
                    loss = self.model(batch[0]).mean()
                    self.log("loss", loss, sync_dist=True)
                    return loss
                def configure_optimizers(self):
                    return sgd(self.model)
            trainer = pl.Trainer(
                accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
                enable_checkpointing=False, enable_model_summary=False, default_root_dir={str(tmp_path)!r})
            module = Module()
            trainer.fit(module, torch.utils.data.DataLoader(rows(8), batch_size=2))
            return trainer.world_size, trainer.global_rank, trainer.global_step, module.model.weight.item()
        list(notebook_launch(train, 2))
        """,
    )
    assert results == [(2, rank, 2, -0.5 * 3.5 * 2) for rank in range(2)]


@pytest.mark.parametrize("start_method", FORKED)
def test_fabric_trains_on_every_rank(kernel: Kernel, start_method: str) -> None:
    results = evaluate(
        kernel,
        f"""
        def train():
            from lightning_fabric import Fabric
            fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
            fabric.launch()
            model = linear()
            model, optimizer = fabric.setup(model, sgd(model))
            loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(8), batch_size=2))
            for (x,) in loader:
                fabric.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            total = fabric.all_reduce(torch.tensor(1.0), reduce_op="sum").item()
            return fabric.world_size, fabric.global_rank, len(loader), total, model.weight.item()
        list(notebook_launch(train, 2, start_method={start_method!r}))
        """,
    )
    # Four updates' worth of rows in two: every rank's batches average to the mean of all rows, 3.5.
    assert results == [(2, rank, 2, 2.0, -0.5 * 3.5 * 2) for rank in range(2)]


# What either is told about the process group.


@pytest.mark.parametrize("backend", ["gloo", None])
@pytest.mark.parametrize("library", ["accelerate", "lightning_fabric"])
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_timeout_for_the_process_group_counts(kernel: Kernel, start_method: str, library: str, backend: str) -> None:
    timeouts = evaluate(
        kernel,
        f"""
        from datetime import timedelta
        import warnings
        import accelerate.state, lightning_fabric.strategies  # What a fork brings along.
        def refuse_warnings_of_the_timeout():
            warnings.filterwarnings("error", ".*_set_pg_timeout")
        def timeout_of_the_group():
            return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        def accelerate():
            from accelerate import Accelerator, InitProcessGroupKwargs
            refuse_warnings_of_the_timeout()
            Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=7))])
            return timeout_of_the_group()
        def lightning_fabric():
            from lightning_fabric import Fabric
            from lightning_fabric.strategies import DDPStrategy
            strategy = DDPStrategy(timeout=timedelta(seconds=7))
            refuse_warnings_of_the_timeout()
            Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()
            return timeout_of_the_group()
        list(notebook_launch({library}, 2, start_method={start_method!r}, backend={backend!r}))
        """,
    )
    assert timeouts == [7.0, 7.0]


# Scripts for torchrun.


@pytest.mark.parametrize("start_method", FORKED)
def test_starting_ranks_inside_a_rank_is_refused(kernel: Kernel, start_method: str) -> None:
    results = evaluate(
        kernel,
        f"""
        def work(rank):
            return rank
        def start_again():
            import torch.multiprocessing as mp
            from torch.multiprocessing import spawn
            told = []
            for start in (lambda: mp.spawn(work, nprocs=2), lambda: spawn(work), lambda: mp.start_processes(work),
                          lambda: dist.init_process_group("nccl")):
                try:
                    start()
                except RuntimeError as error:
                    told.append(str(error))
            dist.barrier()
            return told
        list(notebook_launch(start_again, 2, devices="cpu", start_method={start_method!r}))
        """,
    )
    for rank, (first, second, third, group) in enumerate(results):
        assert first.startswith(f"torch.multiprocessing.spawn was called in rank {rank}: the processes")
        assert "or launch work itself" in second
        assert third.startswith("torch.multiprocessing.start_processes was called in rank")
        assert "NCCL needs a GPU for each rank" in group
        assert "A gloo group of all ranks is up already: leave the call out" in group


@pytest.mark.slow
@pytest.mark.parametrize("start_method", START_METHODS)
def test_main_of_a_torchrun_script_can_be_launched(kernel: Kernel, start_method: str) -> None:
    """It makes its own group, in all the ways there are, and destroys it; in a session, time and again."""
    results = evaluate(
        kernel,
        f"""
        import argparse
        from datetime import timedelta
        from torch.distributed import init_process_group
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler

        def main(backend="gloo", explicit=False, **options):
            parser = argparse.ArgumentParser()
            parser.add_argument("--epochs", type=int, default=2)
            args = parser.parse_args()
            if explicit:
                options |= dict(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
            init_process_group(backend, **options)
            sampler = DistributedSampler(rows(8))
            loader = DataLoader(rows(8), batch_size=2, sampler=sampler)
            model = linear()
            model, optimizer = DDP(model), sgd(model)
            for epoch in range(args.epochs):
                sampler.set_epoch(epoch)
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    optimizer.step()
            dist.barrier()
            dist.destroy_process_group()
            return int(os.environ["LOCAL_RANK"]), model.module.weight.item(), dist.is_initialized()

        ways = [
            dict(),
            dict(backend=None),
            dict(timeout=timedelta(seconds=20)),
            dict(init_method="env://"),
            dict(explicit=True),
            dict(explicit=True, init_method="env://", timeout=timedelta(seconds=20)),
            dict(backend="cpu:gloo"),
            dict(explicit=True, init_method="tcp://127.0.0.1:23456"),
            dict(explicit=True, init_method="tcp://127.0.0.1:23456", timeout=timedelta(seconds=20)),
        ]
        with Session(2, start_method={start_method!r}) as session:
            results = [list(session.run(main, kwargs=way)) for way in [*ways, *ways[:1]]]
        for options in [{{}}, {{"backend": None}}] * ({start_method!r} != "spawn"):
            results.append(list(notebook_launch(main, 2, start_method={start_method!r}, **options)))
        results
        """,
    )
    # Two epochs of two updates; over an epoch, the batches' means average to 3.5.
    assert results == [[(rank, -0.5 * 3.5 * 4, False) for rank in range(2)]] * (10 if start_method == "spawn" else 12)


def test_script_file_run_as_main_can_launch(kernel: Kernel) -> None:
    outcome = kernel.execute(
        """
        import runpy
        def run_script():
            runpy.run_path("script.py", run_name="__main__")
        notebook_launch(run_script, 2);
        """
    )
    assert outcome.error is None, outcome.traceback
    assert "] total 3.0\n" in outcome.stdout


def test_accelerates_barrier_names_no_gpu_that_does_not_exist() -> None:
    """Accelerate's own names the GPU with the number of the rank, of which there are fewer where ranks share GPUs."""
    import torch.distributed as dist

    from notebook_launcher.processes.rank.frameworks import with_existing_device

    calls: list[int] = []
    wait = with_existing_device(lambda state: calls.append(state.local_process_index))
    shares, has_its_own = SimpleNamespace(local_process_index=1_000_000), SimpleNamespace(local_process_index=-1)
    wait(shares)
    assert calls == [1_000_000]  # Without a group Accelerate's own decides.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wait(shares)
        wait(has_its_own)
    finally:
        dist.destroy_process_group()
    assert calls == [1_000_000, -1]
