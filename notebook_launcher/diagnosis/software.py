"""Versions: Python, torch and the libraries around a launch, read from their metadata without an import."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from pathlib import Path

import notebook_launcher
from notebook_launcher.diagnosis.finding import Finding
from notebook_launcher.installed import BROKEN_IPYKERNELS, version_of
from notebook_launcher.settings import accelerate_yaml
from notebook_launcher.tracebacks import PACKAGE_FOLDER

__all__ = ["ipykernel_finding", "look_at_software", "torch_finding"]

AREA = "software"
BESIDE = ("accelerate", "datasets", "ipywidgets", "jupyterlab", "lightning", "numpy", "pandas", "transformers")
"""Packages whose versions a report of a problem needs."""


def look_at_software() -> list[Finding]:
    """Return the versions, and a problem for each that does not work."""
    file = accelerate_yaml.default_path()
    return [
        Finding(area=AREA, name="Python", fact=f"{platform.python_version()} at {sys.executable}"),
        Finding(area=AREA, name="system", fact=platform.platform()),
        Finding(area=AREA, name="notebook-launcher", fact=f"{notebook_launcher.__version__} at {PACKAGE_FOLDER}"),
        torch_finding(version_of("torch")),
        Finding(area=AREA, name="NCCL", fact=_nccl() or "not installed as a package"),
        ipykernel_finding(version_of("ipykernel")),
        Finding(
            area=AREA, name="beside it", fact=", ".join(f"{name} {v}" for name in BESIDE if (v := version_of(name)))
        ),
        Finding(area=AREA, name="settings file", fact=str(file) if file.is_file() else f"none ({file})"),
    ]


def torch_finding(version: str | None) -> Finding:
    """Return the finding about a version of torch; None or an empty text: not installed."""
    if not version:
        advice = "pip install torch"
        return Finding(area=AREA, name="torch", fact="not installed", verdict="problem", advice=advice)
    cuda = _cuda_of_torch()
    return Finding(
        area=AREA, name="torch", fact=f"{version}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}"
    )


def _cuda_of_torch() -> str:
    """Return the CUDA version that torch was built for, from its file: importing torch takes a second."""
    for file in importlib.metadata.files("torch") or ():
        if file.as_posix() == "torch/version.py":
            match = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", Path(file.locate()).read_text("utf-8"), re.MULTILINE)
            return match[1] if match else ""
    return ""


def _nccl() -> str:
    found = [d for d in importlib.metadata.distributions() if (d.name or "").startswith("nvidia-nccl")]
    return ", ".join(sorted({f"{d.version} ({d.name})" for d in found}))


def ipykernel_finding(version: str | None) -> Finding:
    """Return the finding about a version of ipykernel; None: not installed."""
    if version in BROKEN_IPYKERNELS:
        fact = f"{version}, which cannot show rich output that comes from a thread"
        advice = "%pip install 'ipykernel>=7.1' and restart the kernel"
        return Finding(area=AREA, name="ipykernel", fact=fact, verdict="problem", advice=advice)
    return Finding(area=AREA, name="ipykernel", fact=version or "not installed")
