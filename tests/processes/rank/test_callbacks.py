"""transformers' and Lightning's trainers report to the run and obey it, and train as they do without a callback."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.settings.changes import FIXED
from tests.support.linear_cell import DEFINITIONS
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

pytestmark = pytest.mark.slow

# Each function makes a tiny trainer, trains it for so many updates, or until the run says "enough", and returns what it
# has come to. It evaluates after every fourth update.
KERNEL_CODE = (
    DEFINITIONS
    + """
import threading
from notebook_launcher import tunable

def until(condition):
    while not condition():
        assert run.state not in ("failed", "done"), run.result()
        time.sleep(0.01)

def transformers(steps=8, callbacks=(), **options):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
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
    import pytorch_lightning as pl
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

KERNEL_FILES: dict[str, str] = {}  # A working directory of its own, for the folder `out`.

LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed"),
    )
    for name, module in (("transformers", "transformers"), ("lightning", "pytorch_lightning"))
]
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


@pytest.mark.parametrize("library", LIBRARIES)
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


@pytest.mark.parametrize("library", LIBRARIES)
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
