"""Programs as Accelerate's documentation lays them out, with `accelerate` replaced in each import line.

Each is run twice, with its own import lines and with ours, and must return the same.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils._pytree import tree_leaves

from tests.support.toy_training import Sessions, sessions_fixture

if TYPE_CHECKING:
    from pathlib import Path

ranks = sessions_fixture(2)

COMMON = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed

def parts(batch_size=2, size=16):
    set_seed(42)
    features = torch.randn(size, 3)
    data = TensorDataset(features, features.sum(1, keepdim=True))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=16)
    return model, optimizer, DataLoader(data, shuffle=True, batch_size=batch_size), scheduler

def update(accelerator, model, optimizer, batch):
    accelerator.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
    optimizer.step()
    optimizer.zero_grad()
"""

PROGRAMS = {
    "nlp_example": """
def main(folder):
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    model, optimizer, train, scheduler = accelerator.prepare(*parts())
    evaluation = accelerator.prepare(parts(batch_size=3, size=7)[2])
    seen = []
    for epoch in range(2):
        model.train()
        for step, batch in enumerate(train):
            update(accelerator, model, optimizer, batch)
            scheduler.step()
        model.eval()
        for step, batch in enumerate(evaluation):
            with torch.no_grad():
                outputs = model(batch[0])
            predictions, references = accelerator.gather_for_metrics((outputs, batch[1]))
            seen.append(len(predictions))
        accelerator.print(f"epoch {epoch}:", seen[-1])
    accelerator.end_training()
    return seen, scheduler.get_last_lr()
""",
    "checkpointing": """
from accelerate.utils import ProjectConfiguration
from accelerate import skip_first_batches

def main(folder):
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    accelerator.register_for_checkpointing(scheduler)
    for step, batch in enumerate(loader):
        update(accelerator, model, optimizer, batch)
        if step == 1:
            accelerator.save_state()
            break
    accelerator.wait_for_everyone()
    accelerator.load_state(os.path.join(folder, "checkpoints", "checkpoint_0"))
    return len(list(skip_first_batches(loader, 2))), len(list(loader))
""",
    "schedule_free": """
from accelerate.utils import is_schedulefree_available
if is_schedulefree_available():
    import schedulefree

class WithModes(torch.optim.SGD):
    mode = "none"
    def train(self):
        self.mode = "train"
    def eval(self):
        self.mode = "eval"

def main(folder):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, WithModes(model.parameters(), lr=0.1))
    optimizer.train()
    modes = [optimizer.optimizer.mode]
    optimizer.eval()
    return [*modes, optimizer.optimizer.mode]
""",
    "tracking": """
from accelerate.tracking import GeneralTracker, LOGGER_TYPE_TO_CLASS, on_main_process
from accelerate.logging import get_logger

class Lines(GeneralTracker):
    name = "lines"
    requires_logging_directory = False
    def __init__(self, run_name):
        super().__init__()
        self.logged = []
    @property
    def tracker(self):
        return self.logged
    def store_init_configuration(self, values):
        self.logged.append(values)
    @on_main_process
    def log(self, values, step=None):
        self.logged.append((values, step))

def main(folder):
    accelerator = Accelerator(cpu=True, log_with=Lines("run"))
    assert "tensorboard" in LOGGER_TYPE_TO_CLASS
    get_logger(__name__).debug("begins", main_process_only=True)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=0)
    logged = accelerator.get_tracker("lines", unwrap=True) if accelerator.is_main_process else []
    accelerator.end_training()
    return list(logged)
""",
}


def run_program(source: str, library: str, folder: str) -> Any:
    """Run a program whose imports name `library` in place of accelerate."""
    namespace: dict[str, Any] = {"__name__": "program"}
    lines = textwrap.dedent(COMMON + source).splitlines()
    imports = ("from accelerate", "import accelerate")
    text = "\n".join(line.replace("accelerate", library, 1) if line.startswith(imports) else line for line in lines)
    exec(compile(text, "program", "exec"), namespace)
    try:
        return namespace["main"](folder)
    finally:
        namespace["AcceleratorState"]._reset_state(True)
        namespace["GradientState"]._reset_state()


def run_programs(library: str, folder: str) -> dict[str, Any]:
    return {name: run_program(source, library, f"{folder}/{name}") for name, source in PROGRAMS.items()}


def test_ported_programs_return_what_the_originals_return(ranks: Sessions, tmp_path: Path) -> None:
    libraries = ("accelerate", "notebook_launcher.compat")
    theirs, ours = (ranks.run(2, run_programs, library, str(tmp_path / library)) for library in libraries)
    for name in PROGRAMS:
        own, other = (tree_leaves([results[name] for results in each]) for each in (ours, theirs))
        assert own == [pytest.approx(leaf) if isinstance(leaf, float) else leaf for leaf in other], name
