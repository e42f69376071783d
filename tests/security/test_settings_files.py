"""Settings files from elsewhere: a few lines that stand for gigabytes are refused at once, in a short message."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import ConfigError, LaunchConfig

if TYPE_CHECKING:
    from pathlib import Path

KIND = "distributed_type: MULTI_CPU\n"
LEVELS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
LONG = "9" * 50_000
FILES = {
    "aliases": (f"a0: &a0 [x]\n{LEVELS}distributed_type: *a9\n", "more than 8 aliases"),
    "aliases in a key": (f"a0: &a0 [x]\n{LEVELS}{KIND}num_machines: *a9\n", "more than 8 aliases"),
    "code": (f'# notebook-launcher: {{"setup": "import os"}}\n{KIND}', "setup is code"),
    "comment": (f"# notebook-launcher: {'[' * 50_000}\n{KIND}", "is not JSON"),
    "comment of options": (f'# notebook-launcher: {{"timeout": "{LONG}"}}\n{KIND}', "timeout='9999"),
    "date": (f"{KIND}day: 2026-99-99\n", "is not YAML"),
    "depth": (f"{KIND}deep: {'[' * 50_000}", "more than 16 levels"),
    "length": (KIND + f"x: {LONG}\n" * 300, "it has more than 100,000 bytes"),
    "key of a section": (f"{KIND}fsdp_config: {{1: 2}}\n", "the key 1 is no name"),
    "many values": (f"{KIND}x: [{'0,' * 45_000}]\n", "more than 2,000 keys and values"),
    "number": (f"{KIND}num_processes: {LONG}\n", "a value of more than 1,000 characters"),
    "section": (f"{KIND}deepspeed_config: 5\n", "deepspeed_config: 5 must hold settings by name"),
    "several devices": (f"{KIND[:-4]}GPU\ngpu_ids: [{'0, ' * 1_500}0]\n", "gpu_ids"),
    "tag": (f"{KIND}x: !{'y' * 50_000} 1\n", "is not YAML"),
    "value": (f"{KIND}mixed_precision: {LONG}\n", "a value of more than 1,000 characters"),
}


@pytest.mark.parametrize(("text", "reason"), FILES.values(), ids=FILES)
def test_file_that_stands_for_much_is_refused_at_once(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=reason) as caught:
        LaunchConfig.from_yaml(path)
    assert len(str(caught.value)) < 1500
    assert time.process_time() - began < 10  # It takes 20 s and 2 GB where aliases are followed.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000


def test_named_pipe_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings.yaml")
    with pytest.raises(ConfigError, match="it is no ordinary file"):
        LaunchConfig.from_yaml(tmp_path / "settings.yaml")
