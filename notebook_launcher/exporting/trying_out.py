"""A trial of an exported script: its definitions run once, in a process of their own; the function is not called."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.errors import ConfigError
from notebook_launcher.wording.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["try_out"]

TIME_LIMIT = 120.0
"""Seconds after which the trial ends: imports of a large library take 20 on a busy machine."""
# The main program is left out by its text and not by another `__name__`, because the values beside the script may be of
# classes of `__main__`.
RUN = """
import json, sys
path, counts = sys.argv[1], json.loads(sys.argv[2])
sys.argv, __file__ = [path], path
exec(compile(open(path, encoding="utf-8").read().rpartition("\\nif __name__ ==")[0], path, "exec"), globals())
wrong = {name: len(globals()[name]) for name, count in counts.items() if len(globals()[name]) != count}
if wrong:
    sys.exit("entries: " + json.dumps(wrong))
"""
ENTRIES = "entries: "


def try_out(contents: Mapping[Path, bytes], script: Path, registries: Mapping[str, int], env: Mapping[str, str]) -> str:
    """Run a script that is not written yet, without its main program; return a note if it took too long.

    Args:
        contents: The script and the files beside it.
        script: Path of the script.
        registries: Number of entries that collections of the script must have, by name.
        env: Variables of the launch: the script asks for those that it does not hold.

    Raises:
        ConfigError: The script fails; the message names the line.
    """
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        for file, content in contents.items():
            Path(folder, file.name).write_bytes(content)
        copy = Path(folder, script.name)
        try:
            done = subprocess.run(
                [sys.executable, "-c", RUN, str(copy), json.dumps(registries)],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                cwd=script.parent,
                stdin=subprocess.DEVNULL,
                timeout=TIME_LIMIT,
                env={**os.environ, **env, "PYTHONPATH": os.pathsep.join([str(script.parent), *filter(None, sys.path)])},
            )
        except subprocess.TimeoutExpired:
            return f"not tried to the end: the definitions took more than {format_seconds(TIME_LIMIT)}"
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == 0:
        return ""
    if last.startswith(ENTRIES):
        name, number = next(iter(json.loads(last.removeprefix(ENTRIES)).items()))
        raise ConfigError(
            f"{script.name} was not written: {name} would have {number} entries, and has {registries[name]} in the "
            f"notebook. Fill it by decorators, or by statements such as {name}[...] = ... at the top level of a cell."
        )
    places = re.findall(rf'File "{re.escape(str(copy))}", line (\d+)', done.stderr)
    lines = contents[script].decode().splitlines()
    where = f", line {places[-1]}: `{lines[int(places[-1]) - 1].strip()}`" if places else ""
    raise ConfigError(
        f"{script.name} was not written, because its definitions fail by themselves{where}: {last}. Define what this "
        "needs at the top level of a cell, without a loop or a condition around it, or do it inside the function."
    )
