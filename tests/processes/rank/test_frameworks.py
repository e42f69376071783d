"""Other people's code runs in ranks unchanged: what was written for torchrun, Accelerate, Lightning or one process.

None of the functions here knows the launcher. Numbers are compared with what one process computes.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.kernel.run.commands import OTHERS
from notebook_launcher.settings.changes import FIXED
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from tests.support.kernels import Kernel
from tests.support.linear_cell import DEFINITIONS

KERNEL_FILES: dict[str, str] = {}  # the trainers write checkpoints to the working directory

# `transformers` and `lightning` make a tiny trainer each, train it for so many updates, or until the run says "enough",
# and return what it has come to. They evaluate after every fourth update.
KERNEL_CODE = (
    DEFINITIONS
    + """
import pytorch_lightning as pl
from accelerate import Accelerator
from notebook_launcher import tunable
from transformers import AutoConfig, AutoModel, BertConfig, BertForSequenceClassification, PretrainedConfig
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

def until(condition):
    while not condition():
        assert run.state not in ("failed", "done"), run.result()
        time.sleep(0.01)

def transformers(steps=8, callbacks=(), **options):
    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= tunable("enough", False)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    data = [{"input_ids": torch.arange(4) + i % 2, "labels": i % 2} for i in range(16)]
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, max_steps=steps, logging_steps=1, eval_strategy="steps", eval_steps=4,
        learning_rate=0.1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, **options)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[Enough(), *callbacks])
    trainer.train()
    rate = trainer.lr_scheduler.base_lrs[0]
    mine = [each for each in trainer.callback_handler.callbacks if "notebook_launcher" in type(each).__module__]
    weights = sum(each.sum().item() for each in model.parameters())
    return trainer.state.global_step, rate, arguments.max_grad_norm, len(mine), weights

def lightning(steps=8, callbacks=(), **options):
    class Enough(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop |= tunable("enough", False)
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(1, 1)
        def training_step(self, batch, _):
            loss = self.model(batch[0] / 16).square().mean()
            self.log("loss", loss)
            self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss
        def validation_step(self, batch, _):
            self.log("eval_loss", self.model(batch[0] / 16).square().mean(), sync_dist=True)
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, log_every_n_steps=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        default_root_dir="out", gradient_clip_val=1.0, callbacks=[Enough(), *callbacks], **options)
    loader = torch.utils.data.DataLoader(rows(16), batch_size=2)
    module = Module()
    trainer.fit(module, loader, loader)
    rate = trainer.lr_scheduler_configs[0].scheduler.base_lrs[0]
    mine = [each for each in trainer.callbacks if "notebook_launcher" in type(each).__module__]
    return trainer.global_step, rate, trainer.gradient_clip_val, len(mine), module.model.weight.item()
"""
)
KERNEL_IS_NEW = True  # It imports these libraries.


# Hugging Face Accelerate, which tests/compat trains with, too.


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


ALL = "mixed_precision='bf16', gradient_accumulation_steps=4, max_grad_norm=0.5"
MAKERS = {
    "Hugging Face's Accelerator": ["from accelerate import Accelerator", "Accelerator()"],
    "transformers' Trainer": [
        "from transformers import Trainer, TrainingArguments as Arguments",
        "Trainer(linear(), Arguments('.', use_cpu=True, report_to=[], disable_tqdm=True))",
    ],
    "Lightning's Trainer": [
        "from pytorch_lightning import Trainer",
        "Trainer(accelerator='cpu', devices=2, logger=False, enable_checkpointing=False)",
    ],
    "Lightning's Fabric": ["from lightning_fabric import Fabric", "Fabric(accelerator='cpu', devices=2)"],
}
ADVICE = {
    "Hugging Face's Accelerator": (
        "max_grad_norm=0.5",
        "accelerator.clip_grad_norm_(model.parameters(), 0.5) before each step",
    ),
    "transformers' Trainer": (
        "gradient_accumulation_steps=4, max_grad_norm=0.5",
        "TrainingArguments(gradient_accumulation_steps=4, max_grad_norm=0.5)",
    ),
    "Lightning's Trainer": (
        ALL,
        'Trainer(precision="bf16-mixed", accumulate_grad_batches=4, gradient_clip_val=0.5)',
    ),
    "Lightning's Fabric": (ALL, 'Fabric(precision="bf16-mixed"), '),
}
ASKED = """
import os
def train():
    os.environ["NOTEBOOK_LAUNCHER_CALLBACKS"] = "off"
    make()
    from notebook_launcher import track
    for _ in track(range(10**9)):
        time.sleep(0.001)
run = launch(
    train, 2, devices="cpu", mixed_precision="bf16", gradient_accumulation_steps=4, max_grad_norm=0.5, monitor=False)
until(lambda: run.snapshot().ranks[0].done)
for ask in (run.save, run.pause, run.profile, lambda: run.set(lr=0.1)):
    try:
        ask()
    except CallOrderError as error:
        print("asked:", error)
run.stop()
"""


@pytest.mark.parametrize(
    "maker", [next(iter(ADVICE)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*ADVICE][1:])]
)
def test_another_trainer_is_named_with_what_to_write_for_settings_and_requests(kernel: Kernel, maker: str) -> None:
    """Settings of the launch that it does not take are named once; without a callback of ours it takes no requests."""
    settings, advice = ADVICE[maker]
    told = run_cell(kernel, f"def make():\n    {'; '.join(MAKERS[maker])}\n{ASKED}").stdout
    assert told.count("had no effect") == 1, told
    assert f"{settings} had no effect: {maker} has its own settings. Write {advice}" in told
    asked = [line for line in told.splitlines() if line.startswith("asked: ")]
    assert [f"{maker} makes the updates here, and it takes no requests" in line for line in asked] == [True] * 4, asked
    save, change = OTHERS[maker]
    assert [save in line for line in asked] == [True, False, False, False]
    assert [change in line for line in asked] == [False, True, False, True]


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


def test_kernels_own_accelerator_does_not_leave_each_fork_alone(kernel: Kernel) -> None:
    results, kernels = evaluate(
        kernel,
        """
        from accelerate import Accelerator
        mine = Accelerator(cpu=True)
        def count():
            return Accelerator().num_processes
        list(notebook_launch(count, 2, start_method="fork")), (mine.num_processes, mine.state.num_processes)
        """,
    )
    assert results == [2, 2]
    assert kernels == (1, 1)


# Lightning.


def test_fabric_trains_on_every_rank(kernel: Kernel) -> None:
    results = evaluate(
        kernel,
        """
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
        list(notebook_launch(train, 2))
        """,
    )
    # Four updates' worth of rows in two: every rank's batches average to the mean of all rows, 3.5.
    assert results == [(2, rank, 2, 2.0, -0.5 * 3.5 * 2) for rank in range(2)]


# What either is told about the process group.


def test_timeout_for_the_process_group_counts(kernel: Kernel) -> None:
    timeouts = evaluate(
        kernel,
        """
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
        ways = [
            (accelerate, "forkserver", "gloo"), (accelerate, "fork", None),
            (lightning_fabric, "forkserver", None), (lightning_fabric, "fork", "gloo"),
        ]
        [list(notebook_launch(way, 2, start_method=method, backend=backend)) for way, method, backend in ways]
        """,
    )
    assert timeouts == [[7.0, 7.0]] * 4


# Scripts for torchrun.


def test_starting_ranks_inside_a_rank_is_refused(kernel: Kernel) -> None:
    results = evaluate(
        kernel,
        """
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
        list(notebook_launch(start_again, 2, devices="cpu"))
        """,
    )
    for rank, (first, second, third, group) in enumerate(results):
        assert first.startswith(f"torch.multiprocessing.spawn was called in rank {rank}: the processes")
        assert "or launch work itself" in second
        assert third.startswith("torch.multiprocessing.start_processes was called in rank")
        assert "NCCL needs a GPU for each rank" in group
        assert "A gloo group of all ranks is up already: leave the call out" in group


@pytest.mark.slow
def test_main_of_a_torchrun_script_can_be_launched(kernel: Kernel) -> None:
    """It makes its own group, in all the ways there are, and destroys it; in a session, time and again."""
    results = evaluate(
        kernel,
        """
        import argparse
        from datetime import timedelta
        from torch.distributed import init_process_group
        from torch.distributed.elastic.multiprocessing.errors import record
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler

        @record
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
        with Session(2) as session:
            results = [list(session.run(main, kwargs=way)) for way in [*ways, *ways[:1]]]
        results.append(list(notebook_launch(main, 2)))
        results.append(list(notebook_launch(main, 2, start_method="fork", backend=None)))
        results
        """,
    )
    # Two epochs of two updates; over an epoch, the batches' means average to 3.5.
    assert results == [[(rank, -0.5 * 3.5 * 4, False) for rank in range(2)]] * 12


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


# Callbacks that transformers' and Lightning's trainers get: they report to the run, and obey it.

NAMES = {"transformers": "transformers' Trainer", "lightning": "Lightning's Trainer"}
CURVES = {
    "transformers": {
        "loss": [*range(1, 9)],
        "grad_norm": [*range(1, 9)],
        "learning_rate": [*range(1, 9)],
        "eval_loss": [4, 8],
        "train_loss": [8],
    },
    "lightning": {"loss": [*range(1, 9)], "eval_loss": [4, 8], "mean": [4, 8]},
}
CHECKPOINT = {"transformers": "out/checkpoint-{}/trainer_state.json", "lightning": "out/checkpoints/update_{}.ckpt"}


@pytest.mark.slow
@pytest.mark.parametrize("library", NAMES)
def test_trainers_curves_are_reported_and_its_numbers_stay(kernel: Kernel, library: str) -> None:
    """Once, with its own steps, from rank 0; with another callback given by hand, and switched off by a variable."""
    told = run_cell(kernel, f"run = launch({library}, 2, devices='cpu', monitor=False)\nrun.wait();").stdout
    assert told.count(f"{NAMES[library]} got a callback: its curves are in run.metrics, and run.set(lr=...)") == 1
    curves, results, by_hand, off = evaluate(
        kernel,
        f"""
        from notebook_launcher.callbacks import LightningCallback, TransformersCallback
        curves = {{}}
        for point in run.metrics:
            for name in point.values:
                curves.setdefault(name, []).append(point.step)
        given = [TransformersCallback() if {library!r} == "transformers" else LightningCallback()]
        by_hand = launch({library}, 2, devices="cpu", kwargs={{"callbacks": given}}, output="none", monitor=False)
        by_hand.wait()
        os.environ["NOTEBOOK_LAUNCHER_CALLBACKS"] = "off"
        off = launch({library}, 2, devices="cpu", output="none", monitor=False)
        off.wait()
        del os.environ["NOTEBOOK_LAUNCHER_CALLBACKS"]
        assert {{point.rank for point in run.metrics}} == {{0}}
        (curves, list(run.result()), (list(by_hand.result()), len(by_hand.metrics)),
         (list(off.result()), len(off.metrics)))
        """,
    )
    assert curves == CURVES[library]
    assert results == [results[0]] * 2
    assert results[0][:4] == (8, 0.1, 1.0, 1)
    assert by_hand[0] == results
    assert by_hand[1] > 0
    step, rate, norm, num_callbacks, weights = results[0]
    assert off == ([(step, rate, norm, num_callbacks - 1, weights)] * 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("library", NAMES)
def test_trainer_obeys_its_run(kernel: Kernel, library: str) -> None:
    """Settings, a pause, checkpoints and a profile, each after the same update of both ranks; then a stop."""
    told = run_cell(
        kernel,
        f"""
        run = launch({library}, 2, devices="cpu", kwargs={{"steps": 10**6}}, monitor=False)
        until(lambda: run.metrics)
        run.pause()
        until(lambda: run.state == "paused")
        run.set(lr="x0.5", max_grad_norm=0.25)
        run.save()
        run.resume()
        until(lambda: run.state != "paused" and len(run.changes) == 2)
        try:
            run.set(gradient_accumulation_steps=2)
        except ValueError as error:
            print(error)
        run.save()
        print("operators:", run.profile(2)[0].updates)
        print([each.name for each in run.snapshot().settings])
        run.set(enough=True)
        run.wait()
        """,
    ).stdout
    instead = FIXED["gradient_accumulation_steps"][NAMES[library]]
    assert f"gradient_accumulation_steps=2: {NAMES[library]} cannot change it while it trains. Write {instead}" in told
    assert "operators: 2" in told
    assert "['lr', 'max_grad_norm', 'enough']" in told
    paused_at = int(re.search(r"paused after update (\d+)", told)[1])  # type: ignore[index]
    saved = [int(number) for number in re.findall(r"saved .*out/.*, after update (\d+)", told)]
    results, exists, changes, states = evaluate(
        kernel,
        f"""
        stopped = launch({library}, 2, devices="cpu", kwargs={{"steps": 10**6}}, output="none", monitor=False)
        while not stopped.metrics:
            time.sleep(0.01)
        stopped.stop()
        (list(run.result()), [os.path.exists({CHECKPOINT[library]!r}.format(n)) for n in {saved}],
         [(each.name, each.update) for each in run.changes], (run.state, stopped.state))
        """,
    )
    assert results == [results[0]] * 2
    assert results[0][1:4] == (0.05, 0.25, 1)
    assert changes[:2] == [("lr", paused_at), ("max_grad_norm", paused_at)]
    assert saved[0] == paused_at
    assert exists == [True] * 2
    assert states == ("done", "stopped")


@pytest.mark.slow
def test_classes_registered_with_transformers_are_known_in_ranks(kernel: Kernel) -> None:
    names = evaluate(
        kernel,
        """
        class MyConfig(PretrainedConfig):
            model_type = "mine"
        class MyModel(PreTrainedModel):
            config_class = MyConfig
            def __init__(self, config):
                super().__init__(config)
                self.layer = torch.nn.Linear(1, 1)
        AutoConfig.register("mine", MyConfig)
        AutoModel.register(MyConfig, MyModel)
        def build():
            return type(AutoModel.from_config(AutoConfig.for_model("mine"))).__name__
        list(notebook_launch(build, 2, output="none"))
        """,
    )
    assert names == ["MyModel", "MyModel"]
