"""Run notebooks of other libraries by this launcher and by Accelerate's: `python benchmarks/libraries.py`.

Each notebook is run twice, in a fresh kernel: once as it stands, and once with `notebook_launcher.compat` for
`accelerate` in its first cell. Cells before the launch register, patch, seed and set options; 2 ranks on the CPU then
print losses and a checksum of their parameters. The table compares what every rank has printed, to all digits. Models
are made from configurations and data in code, so nothing is loaded from a hub. `--only timm,trl` runs some notebooks,
and `--save FOLDER` keeps what was run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import nbclient
import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.measurements import say
from support.report import machine, table, write

SECONDS = 300
"""Time for one cell: imports of a library take a minute where the machine is busy."""
PRINTED = re.compile(r"= (rank \d+: [^;\n]*);")
"""A line with numbers, without what a launcher writes before it. Two ranks may share a line."""
LAUNCHES = re.compile(r"^(notebook_launcher|study\.optimize)\(", re.MULTILINE)
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # The order in which threads add decides the last digits.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}
LAUNCHERS = {"ours": "notebook_launcher.compat", "accelerate": "accelerate"}

TELL = """
import hashlib

import torch


def tell(model, *losses):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    shown = " ".join(f"{float(loss):.17g}" for loss in losses)
    print(f"= rank {torch.distributed.get_rank()}: losses {shown}, parameters {digest.hexdigest()[:16]};", flush=True)
"""
WORDS = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = "the a red blue old new cat dog bird sees likes hears house river tree".split()
vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *words])}
plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
)
random.seed(3)
texts = [" ".join(random.choices(words, k=8)) for _ in range(64)]
"""

NOTEBOOKS: dict[str, list[str]] = {}
"""By package: the cells; the first one has the import of the launcher, the last one launches."""

NOTEBOOKS["transformers"] = [
    "from accelerate import notebook_launcher",
    """
    import torch
    import transformers
    from torch import nn
    from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.activations import ACT2FN
    from transformers.modeling_outputs import SequenceClassifierOutput

    transformers.logging.set_verbosity_error()
    transformers.set_seed(42)
    """,
    """
    class BagConfig(PreTrainedConfig):
        model_type = "bag"

        def __init__(self, width=16, hidden_act="bent", **kwargs):
            self.width, self.hidden_act = width, hidden_act
            super().__init__(**kwargs)


    class Bent(nn.Module):
        def forward(self, x):
            return (torch.sqrt(x * x + 1) - 1) / 2 + x


    ACT2FN["bent"] = Bent


    class BagModel(PreTrainedModel):
        config_class = BagConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed, self.act = nn.Embedding(100, config.width), ACT2FN[config.hidden_act]
            self.drop, self.head = nn.Dropout(0.1), nn.Linear(config.width, 2)
            self.post_init()

        def forward(self, input_ids, labels=None):
            logits = self.head(self.drop(self.act(self.embed(input_ids).mean(1))))
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)


    AutoConfig.register("bag", BagConfig)
    AutoModelForSequenceClassification.register(BagConfig, BagModel)
    """,
    TELL,
    """
    rows = torch.randint(0, 100, (96, 12))
    data = [{"input_ids": row, "labels": (row.sum() % 2)} for row in rows]


    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(logs.get("loss", logs.get("eval_loss", logs.get("train_loss"))))


    seen = []


    def train():
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bag"))
        args = TrainingArguments(
            "out", num_train_epochs=2, per_device_train_batch_size=8, gradient_accumulation_steps=2, logging_steps=1,
            eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True, learning_rate=1e-2,
        )
        halves = torch.utils.data.random_split(data, [64, 32])
        trainer = Trainer(model, args, train_dataset=halves[0], eval_dataset=halves[1], callbacks=[Losses()])
        trainer.train()
        tell(model, *[loss for loss in seen if loss is not None])


    notebook_launcher(train, num_processes=2)
    """,
]
NOTEBOOKS["trl"] = [
    "from accelerate import notebook_launcher",
    """
    import random
    import torch
    import transformers
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    """,
    WORDS,
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss


    def smoother(logits, labels, vocab_size, **kwargs):
        return 0.9 * ForCausalLMLoss(logits, labels, vocab_size, **kwargs) + 0.1 * logits.float().square().mean()


    LOSS_MAPPING["ForCausalLM"] = smoother
    """,
    TELL,
    """
    def train(epochs):
        config = LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        args = SFTConfig(
            "out", num_train_epochs=epochs, per_device_train_batch_size=4, max_length=16, logging_steps=2,
            save_strategy="no", report_to="none", use_cpu=True, bf16=False, learning_rate=1e-3,
            gradient_checkpointing=False,
        )
        data = Dataset.from_dict({"text": texts})
        trainer = SFTTrainer(LlamaForCausalLM(config), args=args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        tell(trainer.model, *losses)


    notebook_launcher(train, (1,), num_processes=2)
    """,
]
NOTEBOOKS["lightning"] = [
    "from accelerate import notebook_launcher",
    """
    import logging
    import warnings
    import lightning as L
    import torch
    from lightning.pytorch.trainer.connectors import accelerator_connector
    from torch import nn

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(11)
    torch.set_float32_matmul_precision("high")
    accelerator_connector._IS_INTERACTIVE = False  # Lightning refuses "ddp" in forks of a notebook
    """,
    TELL,
    """
    def leaky(x, inplace=False):
        return torch.where(x > 0, x, 0.2 * x)


    nn.functional.relu = leaky


    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
            self.losses = []

        def training_step(self, batch, index):
            x, y = batch
            loss = nn.functional.mse_loss(self.layers(x), y)
            self.losses.append(loss.detach())
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


    x = torch.randn(128, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    """,
    """
    def train():
        model = Net()
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, accumulate_grad_batches=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(model, loader)
        tell(model, *model.losses, trainer.callback_metrics["loss"])


    notebook_launcher(train, num_processes=2)
    """,
]
NOTEBOOKS["fastai"] = [
    "from accelerate import notebook_launcher",
    """
    from fastai.distributed import *
    from fastai.vision.all import *

    set_seed(5, reproducible=True)
    defaults.lr = 5e-3
    """,
    TELL,
    """
    @patch
    def last_losses(self: Learner):
        return [float(loss) for loss in self.recorder.losses]


    @patch
    def _broadcast(self: DistributedDL, numbers, rank):  # fastai's own asks for a GPU
        sent = torch.tensor(numbers)
        torch.distributed.broadcast(sent, rank)
        return sent.tolist()


    class Noisy(Callback):
        def before_batch(self):
            if self.training:
                self.learn.xb = (self.xb[0] + 0.01 * torch.randn_like(self.xb[0]),)


    x = torch.randn(64, 3, 8, 8)
    y = (x.mean((1, 2, 3)) > 0).long()
    """,
    """
    def train():
        random.seed(5)  # Python seeds it anew in every fork, and fastai shuffles by it
        data = list(zip(x, y))
        dls = DataLoaders.from_dsets(data[:48], data[48:], bs=8, device="cpu", num_workers=0)
        dls.c = 2
        model = nn.Sequential(ConvLayer(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 2))
        learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=[Noisy()])
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(sync_bn=False):
            learn.fit_one_cycle(2)
        tell(model, *learn.last_losses(), *learn.recorder.values[-1])


    notebook_launcher(train, num_processes=2)
    """,
]
NOTEBOOKS["optuna"] = [
    "from accelerate import Accelerator, notebook_launcher",
    """
    from pathlib import Path

    import optuna
    import torch
    from torch import nn

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    """,
    TELL,
    """
    x = torch.randn(64, 4)
    y = x @ torch.arange(4.0)[:, None]


    def train(lr, width):
        accelerator = Accelerator()
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(3):
            for inputs, wanted in loader:
                loss = nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        tell(model, loss.item(), mean)
        if accelerator.is_main_process:
            Path("loss.txt").write_text(repr(mean.item()))


    def objective(trial):
        notebook_launcher(train, (trial.suggest_float("lr", 1e-3, 1e-1, log=True), trial.suggest_int("width", 2, 8)), 2)
        return float(Path("loss.txt").read_text())
    """,
    """
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    study.optimize(objective, n_trials=3)
    print(f"= rank 0: best {study.best_value!r} {study.best_params};")
    """,
]
NOTEBOOKS["hydra-core"] = [
    "from accelerate import Accelerator, notebook_launcher",
    """
    from dataclasses import dataclass, field

    import hydra
    import torch
    from hydra.core.config_store import ConfigStore
    from omegaconf import MISSING, DictConfig, OmegaConf
    from torch import nn

    torch.manual_seed(13)
    OmegaConf.register_new_resolver("half", lambda number: number // 2)
    """,
    """
    @dataclass
    class Adam:
        _target_: str = "torch.optim.Adam"
        lr: float = 0.01


    @dataclass
    class Config:
        defaults: list = field(default_factory=lambda: [{"optimizer": "adam"}, "_self_"])
        optimizer: Adam = MISSING
        width: int = 8
        batch: int = "${half:${width}}"


    store = ConfigStore.instance()
    store.store(name="config", node=Config)
    store.store(group="optimizer", name="adam", node=Adam)
    """,
    TELL,
    """
    def train(overrides):
        with hydra.initialize(version_base=None, config_path=None):
            config = hydra.compose("config", overrides=overrides)
        accelerator = Accelerator()
        model = nn.Sequential(nn.Linear(4, config.width), nn.Tanh(), nn.Linear(config.width, 1))
        optimizer = hydra.utils.instantiate(config.optimizer, model.parameters())
        x = torch.randn(32, 4)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        loader = torch.utils.data.DataLoader(data, batch_size=config.batch, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for inputs, wanted in loader:
            loss = nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        tell(model, config.batch, *losses)


    notebook_launcher(train, (["optimizer.lr=0.05", "width=6"],), 2)
    """,
    """
    import sys

    sys.argv = ["notebook", "width=12", "hydra.run.dir=."]


    @hydra.main(version_base=None, config_name="config")
    def decorated(config: DictConfig):
        model = nn.Linear(config.width, config.batch)
        tell(model, config.optimizer.lr)


    def group_and_decorated():
        Accelerator()
        decorated()


    notebook_launcher(group_and_decorated, num_processes=2)
    """,
]
NOTEBOOKS["timm"] = [
    "from accelerate import Accelerator, notebook_launcher",
    """
    import timm
    import timm.optim
    import timm.scheduler
    import torch
    from timm.layers import set_fused_attn
    from timm.models import VisionTransformer, register_model

    torch.manual_seed(21)
    set_fused_attn(False)
    """,
    """
    @register_model
    def vit_mine(pretrained=False, **kwargs):
        options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
        return VisionTransformer(**options, drop_rate=kwargs["drop_rate"])
    """,
    TELL,
    """
    def train():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = timm.create_model("vit_mine", drop_rate=0.1)
        optimizer = timm.optim.create_optimizer_v2(model, "lamb", lr=1e-2)
        scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, warmup_epochs=1)
        x = torch.randn(48, 3, 16, 16)
        data = torch.utils.data.TensorDataset(x, torch.randint(0, 3, (48,)))
        loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for epoch in range(2):
            for images, labels in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
            scheduler.step(epoch + 1)
        tell(model, *losses)


    notebook_launcher(train, num_processes=2)
    """,
]
NOTEBOOKS["torch_geometric"] = [
    "from accelerate import Accelerator, notebook_launcher",
    """
    import torch
    import torch_geometric
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, MessagePassing, global_mean_pool

    torch_geometric.seed_everything(12)
    """,
    """
    plain = GCNConv.reset_parameters


    def smaller(self):
        plain(self)
        with torch.no_grad():
            self.lin.weight.mul_(0.5)


    GCNConv.reset_parameters = smaller


    class Spread(MessagePassing):
        def __init__(self):
            super().__init__(aggr="mean")

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return x_j - x_i


    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.spread, self.head = GCNConv(4, 16), Spread(), torch.nn.Linear(16, 2)

        def forward(self, data):
            x = torch.nn.functional.dropout(self.first(data.x, data.edge_index).relu(), 0.1, self.training)
            return self.head(global_mean_pool(self.spread(x, data.edge_index) + x, data.batch))


    graphs = []
    for _ in range(48):
        x, edges = torch.randn(6, 4), torch.randint(0, 6, (2, 14))
        graphs.append(Data(x=x, edge_index=edges, y=(x.sum() > 0).long().view(1)))
    """,
    TELL,
    """
    def train():
        accelerator = Accelerator()
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        sampler = torch.utils.data.DistributedSampler(graphs, 2, accelerator.process_index)
        loader = DataLoader(graphs, batch_size=4, sampler=sampler)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        tell(model, *losses)


    notebook_launcher(train, num_processes=2)
    """,
]
NOTEBOOKS["diffusers"] = [
    "from accelerate import Accelerator, notebook_launcher",
    """
    import diffusers
    import torch
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.models.activations import ACT2CLS
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    diffusers.utils.logging.set_verbosity_error()
    torch.manual_seed(31)
    """,
    """
    class Wave(torch.nn.Module):
        def forward(self, x):
            return x + 0.1 * torch.sin(x)


    ACT2CLS["wave"] = Wave
    images = torch.randn(32, 3, 16, 16)
    """,
    TELL,
    """
    def train():
        accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=2)
        model = UNet2DModel(
            sample_size=16, block_out_channels=(16, 16), norm_num_groups=4, layers_per_block=1, act_fn="wave",
            dropout=0.1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
        average = EMAModel(model.parameters(), decay=0.9)
        noise_scheduler = DDPMScheduler(num_train_timesteps=100)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = get_cosine_schedule_with_warmup(optimizer, 2, 16)
        loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        losses = []
        for _ in range(2):
            for clean in loader:
                noise = torch.randn(clean.shape)
                steps = torch.randint(0, 100, (clean.shape[0],))
                with accelerator.accumulate(model):
                    predicted = model(noise_scheduler.add_noise(clean, noise, steps), steps, return_dict=False)[0]
                    loss = torch.nn.functional.mse_loss(predicted, noise)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    average.step(model.parameters())
                losses.append(loss.item())
        average.copy_to(model.parameters())
        tell(model, *losses, schedule.get_last_lr()[0])


    notebook_launcher(train, num_processes=2)
    """,
]
NOTEBOOKS["sentence-transformers"] = [
    "from accelerate import notebook_launcher",
    """
    import random
    import torch
    import transformers
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments, losses
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    transformers.logging.set_verbosity_error()
    transformers.set_seed(17)
    """,
    WORDS,
    """
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    plain = Pooling.forward


    def scaled(self, features):
        features = plain(self, features)
        features["sentence_embedding"] = features["sentence_embedding"] * 2
        return features


    Pooling.forward = scaled
    data = Dataset.from_dict({"anchor": texts[::2], "positive": texts[1::2]})
    """,
    TELL,
    """
    def train():
        transformer = Transformer("bert", max_seq_length=16)
        model = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
        args = SentenceTransformerTrainingArguments(
            "out", num_train_epochs=2, per_device_train_batch_size=4, logging_steps=2, save_strategy="no",
            report_to="none", use_cpu=True, learning_rate=1e-3,
        )
        loss = losses.MultipleNegativesRankingLoss(model)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss)
        trainer.train()
        tell(model, *[entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


    notebook_launcher(train, num_processes=2)
    """,
]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one notebook has printed."""

    lines: list[str]
    """The ranks' lines with numbers, sorted: the order between ranks is chance."""
    seconds: float
    """From the first launch to the end of the last cell."""
    error: str
    """The error that ended the notebook, without colours; empty: it ran to its end."""


def notebook(package: str, launcher: str) -> Any:
    """Return the notebook of a package with the launcher's import."""
    first, *cells = [textwrap.dedent(cell).strip() for cell in NOTEBOOKS[package]]
    sources = [first.replace("from accelerate ", f"from {launcher} "), *cells]
    v4: Any = nbformat.v4
    return v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])


def run(made: nbformat.NotebookNode) -> Outcome:
    """Run a notebook in a fresh kernel and an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            made, timeout=SECONDS, kernel_name="python3", record_timing=True, resources={"metadata": {"path": folder}}
        )
        # A kernelspec of the environment starts whatever `python` comes first; this is that of the program.
        manager: Any = client.create_kernel_manager()
        manager.kernel_spec.argv[0] = sys.executable
        error = ""
        try:
            client.execute(env={**os.environ, **ENVIRONMENT, "NOTEBOOK_LAUNCHER_RUNS": f"{folder}/runs"})
        except nbclient.exceptions.CellExecutionError as failure:
            error = re.sub(r"\x1b\[[0-9;]*m", "", f"{failure.traceback}\n{failure.ename}: {failure.evalue}")
        except nbclient.exceptions.CellTimeoutError:
            error = f"longer than {SECONDS} s"
    text = "".join(output.text for cell in made.cells for output in cell.outputs if output.output_type == "stream")
    seconds = sum(_seconds(cell) for cell in made.cells if LAUNCHES.search(cell.source))
    return Outcome(sorted(PRINTED.findall(text)), seconds, error)


def _seconds(cell: nbformat.NotebookNode) -> float:
    times = cell.metadata.get("execution", {})
    stamps = [times.get("iopub.status.busy"), times.get("iopub.status.idle")]
    if None in stamps:
        return 0.0
    began, ended = (datetime.fromisoformat(stamp.replace("Z", "+00:00")) for stamp in stamps)
    return (ended - began).total_seconds()


def compare(package: str, save: Path | None) -> tuple[list[str], str]:
    """Run a package's notebook by both launchers; return its row, and what differs."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return [package, "not installed", "-", "-", "-"], ""
    found: dict[str, Outcome] = {}
    for name, launcher in LAUNCHERS.items():
        say(f"{package}: {name}")
        made = notebook(package, launcher)
        found[name] = run(made)
        if save:
            save.mkdir(parents=True, exist_ok=True)
            (save / f"{package}_{name}.ipynb").write_text(json.dumps(made), encoding="utf-8")
    ours, theirs = found["ours"], found["accelerate"]
    same = ours.lines == theirs.lines and bool(ours.lines) and not ours.error and not theirs.error
    numbers = sum(len(re.findall(r"[0-9a-f.e+-]+", line.partition(":")[2])) for line in ours.lines)
    verdict = f"yes, {numbers} of {numbers}" if same else "**no**"
    wrong = "" if same else "\n".join(f"## {package}: {name}\n\n{_shown(outcome)}" for name, outcome in found.items())
    return [package, version, verdict, *(f"{outcome.seconds:.1f}" for outcome in (ours, theirs))], wrong


def _shown(outcome: Outcome) -> str:
    return "\n".join(f"    {line}" for line in [*outcome.lines, *outcome.error.splitlines()[-12:]]) + "\n"


def main() -> None:
    """Run the notebooks, print the table, and write the report of a full run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"packages, with commas: {', '.join(NOTEBOOKS)}")
    parser.add_argument("--save", type=Path, help="a folder for the notebooks that were run")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(NOTEBOOKS)
    if unknown := [name for name in wanted if name not in NOTEBOOKS]:
        parser.error(f"unknown in --only: {', '.join(unknown)}")
    began = time.monotonic()
    head = f"# Notebooks of other libraries, by both launchers\n\n{machine()}"
    compared = [compare(package, options.save) for package in wanted]
    columns = ["library", "version", "printed numbers equal", "seconds of the launches, ours", "accelerate's"]
    body = "\n".join([table(columns, [row for row, _ in compared]), *(wrong for _, wrong in compared if wrong)])
    print(body, flush=True)
    if not options.only:
        minutes = (time.monotonic() - began) / 60
        how = (
            f"One run of `python benchmarks/libraries.py`, {minutes:.0f} minutes, each notebook once; 2 ranks. A "
            "launch comes right after the imports, which the process from which ranks are forked then makes once more."
        )
        path = write("libraries", f"{head}\n{how}\n\n{body}")
        say(f"written to {path}")


if __name__ == "__main__":
    main()
