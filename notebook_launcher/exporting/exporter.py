"""`export(...)`."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig
from notebook_launcher.errors import ConfigError
from notebook_launcher.exporting.script_text import (
    MARK,
    job_text,
    launch_words,
    run_options,
    script_text,
    secret_variables,
    torchrun_words,
)
from notebook_launcher.exporting.trying_out import try_out
from notebook_launcher.kernel.calls import everywhere
from notebook_launcher.kernel.calls.checks import check_call
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.notebook_code.needs import Needs, literal_of
from notebook_launcher.settings.option_numbers import MAX_SEED
from notebook_launcher.wording.text import type_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Container, Iterable, Sequence

    from notebook_launcher.kernel.plan import Plan

__all__ = ["Exported", "export"]

VALUES = ".values"
JOB = ".sbatch"
"""Suffixes of the files beside the script."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Files that `export` has written, and the commands that run them."""

    script: Path
    values: Path | None
    """File with the values that have no literal, which must lie beside the script; None if there are none."""
    job: Path | None
    """Job file for Slurm; None unless `slurm` was given."""
    commands: tuple[str, ...]
    """Commands to type in the script's folder."""
    notes: tuple[str, ...] = ()
    """Requirements of the script on the machine that runs it."""

    def __repr__(self) -> str:
        files = ", ".join(str(path) for path in (self.script, self.values, self.job) if path is not None)
        return "\n".join([f"written: {files}", *(f"    {command}" for command in self.commands), *self.notes])


def export(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    num_processes: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    slurm: bool | Mapping[str, Any] = False,
    overwrite: bool = False,
    **options: Any,
) -> Exported:
    """Write a launch as a script that torchrun, `notebook-launcher launch` and Slurm run with the same numbers.

    The script contains the function, the definitions of the notebook that it uses, their imports and constants,
    `%%everywhere` cells and `setup`, and a main program that seeds each rank and joins the process group as a launch
    does. Registries that decorators or statements such as `REG["a"] = f` fill are filled by these in the script.
    Values without a literal, such as tensors, lie in a file beside it. The function's return value is dropped: let the
    function save what you need. Before anything is written, the definitions are tried in a process of their own.

    Args:
        fn: The function, defined at the top level of a cell or in a module.
        path: Path of the script, such as `"train.py"`.
        num_processes: As in `notebook_launch`; the job file and the commands contain the number.
        args: Positional arguments of `fn`.
        kwargs: Keyword arguments of `fn`.
        config: Options of the launch. Without `seed`, a seed is drawn and written into the script.
        slurm: True, or options of sbatch by name (`{"time": "2:00:00", "partition": "gpu"}`), to write a job file.
        overwrite: Replace files that `export` has not written, too.
        options: Fields of `LaunchConfig` by name; they override `config`. The script holds those about the training,
            the seed, devices and variables; the command of `notebook-launcher launch` holds those about the run, such
            as `timeout` and `name`. Variables that look like secrets are not written: the script asks for them. With
            other variables, only its owner can read it.

    Returns:
        The files, and the commands that run them.

    Raises:
        ConfigError: An option cannot work; something that the function uses has no source or cannot be written, which
            the message names; the script's definitions fail by themselves; or a file is there that `export` has not
            written.
    """
    given = {} if num_processes is None else {"num_processes": num_processes}
    config = LaunchConfig.build(config, {**given, **options})
    if config.seed is None:
        config = dataclasses.replace(config, seed=secrets.randbelow(MAX_SEED + 1))
    _check_engine(config)
    sbatch = _sbatch_options(slurm)
    plan = make_plan(config)
    _, args, kwargs, _ = check_call(fn, args, kwargs, launcher="export(fn, path, 2")
    script = _script_path(path)
    needs, name = _needs_of(fn, config.setup)
    arguments = _arguments(needs, args, kwargs)
    needs.check_order()
    contents = _contents(needs, plan, script, function=name, arguments=arguments, sbatch=sbatch)
    _check_free(contents, script, overwrite=overwrite)
    untried = try_out(contents, script, needs.registries, plan.config.env)
    for file, content in contents.items():
        if plan.config.env:  # Its values are nobody else's business.
            file.touch(0o600)
            file.chmod(0o600)
        file.write_bytes(content)
    return _exported(needs, plan, script, contents, untried)


def _check_engine(config: LaunchConfig) -> None:
    if config.engine is not None:
        raise ConfigError(
            f"export(..., engine={config.engine!r}): a script is started by torchrun or a job. Omit engine=.",
            field="engine",
        )


def _sbatch_options(slurm: bool | Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the options of sbatch; None if no job file is wanted."""
    if isinstance(slurm, Mapping):
        return slurm or None
    if not isinstance(slurm, bool):
        raise ConfigError(
            f"export(..., slurm={slurm!r}) is {type_of(slurm)}; it must be True, False or options of sbatch by name."
        )
    return {} if slurm else None


def _contents(
    needs: Needs,
    plan: Plan,
    script: Path,
    *,
    function: str,
    arguments: str,
    sbatch: Mapping[str, Any] | None,
) -> dict[Path, bytes]:
    """Return the files to write: the script, the values if there are any, and the job file if it is wanted."""
    values, command = script.with_suffix(VALUES), shlex.join(torchrun_words(plan, script))
    text = script_text(needs, plan, function=function, arguments=arguments, values=values.name, command=command)
    contents = {script: text.encode()}
    if needs.values:
        contents[values] = pickle.dumps(needs.values)
    if sbatch is not None:
        contents[script.with_suffix(JOB)] = job_text(plan, script, sbatch).encode()
    return contents


def _exported(needs: Needs, plan: Plan, script: Path, written: Container[Path], untried: str) -> Exported:
    values, job = script.with_suffix(VALUES), script.with_suffix(JOB)
    commands = [shlex.join(torchrun_words(plan, script)), shlex.join(launch_words(plan, script))]
    commands += [f"sbatch {job.name}"] if job in written else []
    return Exported(
        script=script,
        values=values if values in written else None,
        job=job if job in written else None,
        commands=tuple(commands),
        notes=(*_notes(needs, script), *_left_out(plan), *_to_set(plan), *filter(None, [untried])),
    )


def _script_path(path: str | os.PathLike[str]) -> Path:
    script = Path(path).expanduser().absolute()
    if script.suffix != ".py":
        raise ConfigError(f"export(path={str(path)!r}): the name of a script ends in .py.")
    if not script.parent.is_dir():
        raise ConfigError(f"export(path={str(path)!r}): there is no folder {script.parent}.")
    return script


def _needs_of(function: Any, setup: Any) -> tuple[Needs, str]:
    """Return what a function and the code before it need, and the name under which the script has the function."""
    if not inspect.isfunction(inspect.unwrap(function)) or not hasattr(function, "__qualname__"):
        raise ConfigError(
            f"{type(function).__name__} objects cannot be exported. Pass a function that is defined with `def`, and "
            "its arguments as args= and kwargs=."
        )
    # A notebook's functions live in `__main__`; a function of a module is imported by the script.
    needs = Needs(vars(sys.modules["__main__"]))
    for what, code, made in everywhere.kept_code():
        needs.add_code(what, code, makes=made)
    if isinstance(setup, str):
        needs.add_code("setup=", setup)
    elif setup is not None:
        name = getattr(setup, "__name__", "setup")
        needs.add(name, setup)
        needs.add_code("setup=", f"{name}()")
    needs.add(function.__name__, function)
    if function.__name__ in needs.values:
        raise ConfigError(f"{function.__qualname__} cannot be exported: no module has it under this name.")
    return needs, function.__name__


def _arguments(needs: Needs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of the call as code."""
    parts = [_expression(needs, f"argument {place}", value) for place, value in enumerate(args, 1)]
    parts += [f"{name}={_expression(needs, f'argument {name}', value)}" for name, value in kwargs.items()]
    return ", ".join(parts)


def _expression(needs: Needs, name: str, value: Any) -> str:
    if (text := literal_of(value)) is not None:
        return text
    own = getattr(value, "__name__", None)
    if inspect.isfunction(value) or isinstance(value, type):
        needs.add(str(own), value)
        return str(own)
    needs.add(name, value)
    return f"_VALUES[{name!r}]"


def _check_free(files: Iterable[Path], script: Path, *, overwrite: bool) -> None:
    for file in files:
        if overwrite or not file.exists():
            continue
        marked = script if file.suffix == VALUES else file  # Values are export's own if the script beside them is.
        if not marked.exists() or MARK not in marked.read_text(encoding="utf-8", errors="replace"):
            raise ConfigError(
                f"{file} exists, and export() has not written it. Choose another name, or pass overwrite=True."
            )


def _left_out(plan: Plan) -> list[str]:
    """Return a note about options that a command does not carry out."""
    options = run_options(plan)
    notes = ["debug=True is left out: a script has no cell in which a debugger opens"] if "debug" in options else []
    if only_here := sorted(options.keys() - {"debug", "max_restarts"}):
        notes.append(f"torchrun has no {', '.join(only_here)}: `notebook-launcher launch` has")
    return notes


def _to_set(plan: Plan) -> list[str]:
    names = secret_variables(plan)
    return [f"set {', '.join(names)} where the script runs: their values are secrets, and not written"] if names else []


def _notes(needs: Needs, script: Path) -> tuple[str, ...]:
    notes = []
    for line in needs.imports:
        name = line.split()[1].partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and "site-packages" not in file and name not in sys.stdlib_module_names:
            folder = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
            if folder != script.parent and name != "notebook_launcher":
                notes.append(f"{name} is imported from {folder}: have it beside the script, or on PYTHONPATH")
    notes += [f"{name} is not defined in this notebook" for name in sorted(needs.unknown)]
    return tuple(dict.fromkeys(notes))
