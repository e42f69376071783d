"""`launch`: run a script or module on every rank, as `accelerate launch` and `torchrun` do."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.command import Command
from notebook_launcher.command_line.launch_options import (
    add_options,
    as_typed,
    check_words,
    given_options,
    without_effect,
)
from notebook_launcher.command_line.sharding_options import sharding_env
from notebook_launcher.config import LaunchConfig, changed_options, load_accelerate_file
from notebook_launcher.errors import ConfigError, LaunchError, RankFailedError, RunTimeoutError
from notebook_launcher.settings import accelerate_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

__all__ = ["COMMAND"]

TIMED_OUT = 124
"""Exit status of a run that exceeded `--timeout`, as of timeout(1)."""
BY_SIGNAL = 128
"""Exit status of a run that a signal ended, less the signal's number, as shells have it."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.usage = "notebook-launcher launch [OPTIONS] SCRIPT [ARGUMENTS]"
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a folder or zip file with a __main__.py")
    rest = parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    rest.required = False  # argparse would call them missing, too, where the script is.


def _run(options: argparse.Namespace) -> int:
    # Imported here: the module is for ranks, and other commands do not need it.
    from notebook_launcher.processes.rank.script import Script

    config = _config(options)
    script = Script(options.script, is_module=options.module)
    script.check()
    for ignored, reason in without_effect(options).items():
        _say(f"ignored: {ignored} ({reason})")
    try:
        return _launch(script, options.words, config)
    except ConfigError as error:
        given = given_options(options, has_engine=config.engine is not None)
        raise as_typed(error, given, vars(options).get("typed", {})) from None


def _config(options: argparse.Namespace) -> LaunchConfig:
    config, file = LaunchConfig(), None
    default = accelerate_yaml.default_path()
    if options.config_file is not None or (default.is_file() and not options.no_config_file):
        config, file = _read_settings(options.config_file)
    given = given_options(options, has_engine=config.engine is not None)
    if file is not None:
        changed = [f"{name}={value}" for name, value in changed_options(config).items() if name not in given]
        _say(f"settings of {file.path}: {', '.join(changed) or 'the defaults'}")
        if file.ignored:
            _say(f"ignored in {file.path}: {', '.join(file.ignored)}")
    env = {**sharding_env(vars(options), config.env), **given.get("env", {})}
    try:
        config = LaunchConfig.build(config, {**given, "env": {**config.env, **env}} if env else given)
    except ConfigError as error:
        raise as_typed(error, given, vars(options).get("typed", {})) from None
    if options.multi_gpu:
        _check_gpus()
    return config


def _read_settings(path: str | None) -> tuple[LaunchConfig, accelerate_yaml.AccelerateFile]:
    try:
        return load_accelerate_file(path)
    except ConfigError as error:
        if path is not None:
            raise
        raise ConfigError(f"{error} --no_config_file launches without it.") from None


def _check_gpus() -> None:
    from notebook_launcher.machine import devices

    if why := devices.detect().why_no_gpu:
        raise ConfigError(f"--multi_gpu: {why}. Without --multi_gpu, the ranks use the CPU.")


def _launch(script: Any, words: Sequence[str], config: LaunchConfig) -> int:
    from notebook_launcher.kernel.launch import notebook_launch

    caught: list[int] = []

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        caught.append(signum)
        raise KeyboardInterrupt

    # Slurm, systemd and `kill` ask by SIGTERM; a terminal that closes, by SIGHUP. Both stop the run as Ctrl-C does.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupt)
    try:
        notebook_launch(script, args=tuple(words), config=config)
    except KeyboardInterrupt:
        return BY_SIGNAL + (caught[0] if caught else signal.SIGINT)
    except RunTimeoutError as error:
        _say(str(error))
        return TIMED_OUT
    except Exception as error:  # the script's own exception, of any type
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    """Show a failure as a notebook's cell would; return the exit status."""
    story = vars(error).get("_render_traceback_")
    if story is None and (isinstance(error, ConfigError) or not isinstance(error, LaunchError)):
        raise error
    _show("\n".join(story()) if story is not None else f"{type(error).__name__}: {error}")
    code = error.exitcode if isinstance(error, RankFailedError) else None
    if isinstance(error, ConfigError):
        return 2
    return 1 if code is None else code if code >= 0 else BY_SIGNAL - code


def _say(text: str) -> None:
    _show(f"notebook-launcher launch: {text}")


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(
    name="launch",
    summary="run a script or module on every rank, as `accelerate launch` and `torchrun` do",
    description="""\
Run a Python script on every rank, as the main program with its own arguments. torchrun's variables are set, and the
process group exists. The script may use torch.distributed, Hugging Face Accelerate, or this package.

  notebook-launcher launch --num_processes 2 train.py --lr 0.1
  notebook-launcher launch --nproc_per_node 4 --mixed_precision bf16 -m package.train
  notebook-launcher launch --cpu --config_file settings.yaml train.py
  notebook-launcher launch --engine "ssh gpu1 gpu2" --processes_per_node 8 train.py
  notebook-launcher launch --detached train.py

Options of `accelerate launch` and `torchrun` are accepted by their names, with _ or - between the words. Options come
before the script; everything after it belongs to the script. Without --config_file, the file that `accelerate config`
or `notebook-launcher config` has written is read, if there is one.

Ctrl-C stops the run, and a second Ctrl-C kills it. With --detached, the run continues after the first Ctrl-C and after
the end of the terminal; `notebook-launcher attach` shows it again. The run leaves a folder: see `notebook-launcher
runs`. The exit status is 0, n for sys.exit(n), 128 + n for signal n, 1 for an exception, 124 for --timeout, 130 for
Ctrl-C, and 2 if nothing could be started.""",
    add_arguments=_add_arguments,
    run=_run,
    check_words=check_words,
)
