"""Settings of a panel's last run, kept for the next panel of the same function in the same notebook.

The file lies beside the run folders. Nothing is kept if runs leave no folder, or if the notebook is unknown. Values
that cannot be typed, and arguments with names of secrets, are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster import engine_texts
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.history.folder_files import read_json
from notebook_launcher.history.run_files import replace
from notebook_launcher.widgets.launching.options import ADVANCED, ESSENTIAL
from notebook_launcher.widgets.launching.parameters import MISSING
from notebook_launcher.widgets.launching.typed import default_of
from notebook_launcher.wording.secret_text import is_secret
from notebook_launcher.wording.value_text import name_of

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.widgets.launching.launch_state import LaunchState
    from notebook_launcher.widgets.launching.parameters import Parameter

__all__ = ["Settings", "file_of", "read", "settings_of", "write"]

OPTIONS = (*ESSENTIAL, *ADVANCED)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Options and arguments that differ from their defaults, as plain JSON values."""

    options: dict[str, Any]
    arguments: dict[str, Any]

    def apply(self, state: LaunchState) -> list[str]:
        """Fill the fields that have their defaults; return the keys of the fields that were filled."""
        filled = [name for name, value in self.options.items() if _apply_option(state, name, value)]
        for name, data in self.arguments.items():
            parameter = state.parameters.get(name)
            value = MISSING if parameter is None or name in state.arguments else _decode(parameter, data)
            if value is not MISSING:
                state.set_argument(name, value)
                filled.append(f"arguments.{name}")
        return filled


def settings_of(state: LaunchState) -> Settings:
    """Return the settings of a panel that differ from their defaults and that can be typed."""
    options = {name: getattr(state.config, name) for name in OPTIONS}
    options = {name: value for name, value in options.items() if value != default_of(name)}
    arguments = {
        name: _encode(parameter, state.arguments[name])
        for name, parameter in state.parameters.items()
        if name in state.arguments and not is_secret(name, state.arguments[name])
    }
    if "engine" in options:
        options["engine"] = engine_texts.write(options["engine"])
    return Settings(
        {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        {name: data for name, data in arguments.items() if data is not MISSING},
    )


def file_of(function: Any, config: LaunchConfig) -> Path | None:
    """Return the file for a function of this notebook; None if no settings are kept."""
    # VS Code names the notebook in a variable of its cells, Jupyter's server in the environment.
    named = sys.modules["__main__"].__dict__.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")
    try:
        home = run_folders.find_home(config.runs_folder)
    except RuntimeError:
        return None
    if home is None or not named or function is None:
        return None
    key = "\n".join([str(named), os.getcwd(), name_of(function)])
    return home / "panels" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def write(path: Path, settings: Settings) -> None:
    """Write settings to a file; if the disk is full, only the next panel lacks them."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = json.dumps(dataclasses.asdict(settings)).encode("ascii")
        replace(path, data, path.with_suffix(f".{os.getpid()}"))


def read(path: Path) -> Settings | None:
    """Return the settings in a file; None if there are none."""
    data = read_json(path.parent, path.name) or {}
    options, arguments = data.get("options"), data.get("arguments")
    if not isinstance(options, dict) or not isinstance(arguments, dict):
        return None
    return Settings(options, arguments)


def _apply_option(state: LaunchState, name: str, value: Any) -> bool:
    if name not in OPTIONS or getattr(state.config, name) != default_of(name) or value == default_of(name):
        return False
    try:
        state.config = dataclasses.replace(state.config, **{name: value})
    except ConfigError:
        return False
    return True


def _encode(parameter: Parameter, value: Any) -> Any:
    if parameter.kind == "code" or not parameter.fits(value):
        return MISSING
    if parameter.kind == "choice":
        return repr(value)
    return value if value is None or parameter.kind == "bool" else parameter.text_of(value)


def _decode(parameter: Parameter, data: Any) -> Any:
    if parameter.kind == "choice":
        return next((choice for choice in parameter.choices if repr(choice) == data), MISSING)
    if data is None or parameter.kind == "bool":
        return data if parameter.fits(data) else MISSING
    with contextlib.suppress(ValueError):
        return parameter.parse(data) if isinstance(data, str) and parameter.kind != "code" else MISSING
    return MISSING
