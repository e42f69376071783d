"""Costs of an import of the package: what it must not import, open or start before that is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORT_PROBE = """
import os, sys, threading
threads, descriptors = threading.active_count(), set(os.listdir("/proc/self/fd"))
import notebook_launcher
heavy = {"torch", "numpy", "ipywidgets", "anywidget", "IPython", "ipykernel"} & set(sys.modules)
assert not heavy, f"imported {sorted(heavy)}"
assert threading.active_count() == threads, threading.enumerate()
assert set(os.listdir("/proc/self/fd")) == descriptors, "a descriptor was opened"
with open(f"/proc/self/task/{os.getpid()}/children") as children:
    assert not children.read(), "a process was started"
"""


def test_importing_the_package_is_light():
    subprocess.run([sys.executable, "-c", IMPORT_PROBE], check=True, cwd=ROOT)


def test_modules_beside_the_ranks_import_without_torch():
    ranks = ("callbacks", "compat", "gpu_check", "processes", "training", "__main__")
    names = [
        ".".join(["notebook_launcher", *path.relative_to(folder).with_suffix("").parts])
        for folder in (ROOT, ROOT / "notebook_launcher")
        for path in folder.glob("widgets/**/*.py" if folder == ROOT else "**/*.py")
        if path.name != "__init__.py" and path.relative_to(folder).with_suffix("").parts[0] not in ranks
    ]
    assert len(names) > 100
    probe = f"import sys, importlib; sys.modules['torch'] = None; [*map(importlib.import_module, {names})]"
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=ROOT, timeout=100)


def test_program_imports_a_command_when_it_is_typed():
    probe = "import sys, notebook_launcher.command_line.program; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", probe], check=True, cwd=ROOT, capture_output=True, text=True)
    rooms = {name.split(".")[1] for name in imported.stdout.split() if name.startswith("notebook_launcher.")}
    heavy = {"detached", "drawing", "engines", "history", "kernel", "messaging", "processes", "travel", "widgets"}
    assert not rooms & heavy


LATER = ("torch", "numpy", "asyncio", "cloudpickle", "psutil", "html", "multiprocessing", "yaml", "IPython",
         "ipykernel", "ipywidgets", "notebook_launcher.drawing", "notebook_launcher.engines",
         "notebook_launcher.history", "notebook_launcher.kernel.run", "notebook_launcher.messaging.messages",
         "notebook_launcher.detached", "notebook_launcher.processes", "notebook_launcher.travel",
         "notebook_launcher.widgets")  # fmt: skip
"""Modules that a notebook's first cell must not import: each takes milliseconds, and `messages` as long as the rest."""


def test_importing_the_launcher_is_light():
    probe = "import sys; from notebook_launcher import launch, notebook_launch, report; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", probe], check=True, cwd=ROOT, capture_output=True, text=True)
    assert not set(LATER) & set(imported.stdout.split())


SELDOM = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "sympy",
    "torch._dynamo",
)
"""Modules that a program with an Accelerator seldom needs: 1.2 s of processor time, in the kernel and in each rank."""


def test_accelerates_names_are_found_without_torch_and_the_accelerator_imports_no_sharding():
    probe = f"""
import sys, notebook_launcher
assert not hasattr(notebook_launcher, "nowhere")
assert "torch" not in sys.modules
from notebook_launcher import Accelerator
Accelerator()
found = set({SELDOM}) & set(sys.modules)
assert not found, found
from notebook_launcher import training
for name in training.__all__:
    assert getattr(notebook_launcher, name) is getattr(training, name), name
assert not {{"LocalSGD", "tqdm"}} & {{*dir(notebook_launcher), *notebook_launcher.__all__}}
from notebook_launcher import AcceleratorState, DDPCommunicationHookType, LocalSGD, tqdm
"""
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=ROOT)
