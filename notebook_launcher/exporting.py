"""`export(...)`: a function of the notebook as a script for torchrun, `notebook-launcher launch` and Slurm."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import pickle
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig, changed_options
from notebook_launcher.errors import ConfigError
from notebook_launcher.files import replace_file
from notebook_launcher.kernel.calls import everywhere
from notebook_launcher.kernel.calls.checks import bound_arguments, check_call
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.notebook_code import Needs, literal_of
from notebook_launcher.settings.option_checks import MAX_SEED
from notebook_launcher.settings.training_settings import PRECISION_VARIABLE, STEPS_VARIABLE, TrainingSettings
from notebook_launcher.travel import repeated_calls
from notebook_launcher.travel.cell_code import Contents, Member, Overload, Subclass
from notebook_launcher.travel.replacements import replaced_attributes_of
from notebook_launcher.wording import format_seconds, is_secret, redact, type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.travel.replacements import Replacement


# --------------------------------------------------------------------------------------------------------------------
# `export(...)`.


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
            other variables, and with arguments or code that look like secrets, only its owner can read it.

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
    if config.engine is not None:
        raise ConfigError(
            f"export(..., engine={config.engine!r}): a script is started by torchrun or a job. Omit engine=.",
            field="engine",
        )
    if not isinstance(slurm, bool | Mapping):
        raise ConfigError(f"export(..., slurm={slurm!r}) must be True, False or options of sbatch by name.")
    plan = make_plan(config)
    _, args, kwargs, _ = check_call(fn, args, kwargs, launcher="export(fn, path, 2")
    script = _script_path(path)
    needs, name = _needs_of(fn, config.setup)
    arguments = _arguments(needs, args, kwargs)
    needs.check_order()

    values, job = script.with_suffix(VALUES), script.with_suffix(JOB)
    commands = [shlex.join(torchrun_words(plan, script)), shlex.join(launch_words(plan, script))]
    text = script_text(needs, plan, call=f"{name}({arguments})", values=values.name, command=commands[0])
    contents = {script: text.encode()}
    if needs.values:
        contents[values] = pickle.dumps(needs.values)
    if slurm:
        contents[job] = job_text(plan, script, slurm if isinstance(slurm, Mapping) else {}).encode()
        commands.append(f"sbatch {job.name}")
    _check_free(contents, script, overwrite=overwrite)
    untried = try_out(contents, script, needs.registries, plan.config.env)

    given_here = bound_arguments(fn, args, kwargs).items()
    secret = [name for name, value in given_here if isinstance(value, str) and value and is_secret(name, value)]
    holds = f"the script holds {', '.join(secret)}: its owner alone can read it" if secret else ""
    is_private = bool(plan.config.env or secret or redact(text) != text)  # Nobody else's business.
    try:
        for file, content in contents.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, functools.partial(Path.write_bytes, data=content), mode=0o600 if is_private else 0o666)
    except OSError as error:
        raise ConfigError(f"export(path={os.fspath(file)!r}): it cannot be written: {error.strerror}.") from error
    return Exported(
        script=script,
        values=values if values in contents else None,
        job=job if job in contents else None,
        commands=tuple(commands),
        notes=(*_notes(needs, plan, script), *filter(None, (untried, holds))),
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
    for call in repeated_calls():
        _add_change(needs, call.text, functools.partial(Needs.add_code, key=call.text, code=call.text))
    replaced = replaced_attributes_of(os.getpid())
    needs.unwritten.update(replaced.lacking)
    for replacement in replaced.look():
        _add_change(needs, str(replacement.place), functools.partial(_set_again, replacement=replacement))
    needs.add(function.__name__, function)
    if function.__name__ in needs.values:
        raise ConfigError(f"{function.__qualname__} cannot be exported: no module has it under this name.")
    return needs, function.__name__


def _add_change(needs: Needs, what: str, add: Callable[[Needs], None]) -> None:
    """Add what a cell has changed in a library; a note names what cannot be written."""
    try:
        add(Needs(vars(sys.modules["__main__"])))  # first to another object, which an error leaves half filled
    except ConfigError:
        needs.unwritten.add(what)
    else:
        add(needs)


def _set_again(needs: Needs, replacement: Replacement) -> None:
    """Add the statement that makes a change again; raise `ConfigError` for what cannot be written."""
    (module, steps), value = replacement.place, replacement.value
    needs.add_import(f"import {module}")
    owner = module
    for step in steps[:-1]:
        key = step[0] if isinstance(step, tuple) else step
        owner += f".{step}" if isinstance(step, str) else f"[{_text_of(needs, key)}]"
    match steps[-1]:
        case Subclass(cls):
            _text_of(needs, cls)
            return
        case Contents():
            text, fill = _text_of(needs, value), "extend" if isinstance(value, list) else "update"
            code = f"{owner}.clear()\n{owner}.{fill}({text})"
        case Member(item):
            text = _text_of(needs, item)
            code = f"if {text} not in {owner}:\n    getattr({owner}, 'add', getattr({owner}, 'append', None))({text})"
        case Overload(cls):
            code = f"{owner}.register({_text_of(needs, cls)}, {_text_of(needs, value)})"
        case str() | (_,) as last:
            target = f"{owner}.{last}" if isinstance(last, str) else f"{owner}[{_text_of(needs, last[0])}]"
            code = f"del {target}" if replacement.is_deleted else f"{target} = {_text_of(needs, value)}"
        case _:
            raise ConfigError(f"{replacement.place} cannot be written.")
    needs.add_code(code, code, makes=(module.partition(".")[0],))


def _text_of(needs: Needs, value: Any) -> str:
    """Return code for a value, with what it needs: a literal, or the name of a definition."""
    if (text := literal_of(value)) is not None:
        return text
    if isinstance(value, list):
        return f"[{', '.join(_text_of(needs, each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text_of(needs, key)}: {_text_of(needs, each)}' for key, each in value.items())}}}"
    name = getattr(value, "__name__", "")
    if vars(sys.modules["__main__"]).get(name) is not value:
        raise ConfigError(f"{type_of(value)} has no literal and no name.")
    needs.add(name, value)
    return str(name)


def _arguments(needs: Needs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
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


def _notes(needs: Needs, plan: Plan, script: Path) -> list[str]:
    """Return what the script needs beside it, and what it leaves out."""
    notes = []
    for line in needs.imports:
        name = line.split()[1].partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and "site-packages" not in file and name not in sys.stdlib_module_names:
            folder = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
            if folder != script.parent and name != "notebook_launcher":
                notes.append(f"{name} is imported from {folder}: have it beside the script, or on PYTHONPATH")
    notes += [f"what cells have done at {what} is not written" for what in sorted(needs.unwritten)]
    notes += [f"{name} is not defined in this notebook" for name in sorted(needs.unknown)]
    options = run_options(plan)
    if "debug" in options:
        notes.append("debug=True is left out: a script has no cell in which a debugger opens")
    if only_here := sorted(options.keys() - {"debug", "max_restarts"}):
        notes.append(f"torchrun has no {', '.join(only_here)}: `notebook-launcher launch` has")
    if names := secret_variables(plan):
        notes.append(f"set {', '.join(names)} where the script runs: their values are secrets, and not written")
    return list(dict.fromkeys(notes))


# --------------------------------------------------------------------------------------------------------------------
# The text of an exported script, and of a job for Slurm.


MARK = "# Written by notebook_launcher.export."
REQUIRE = """\
for _name in {names!r}:  # Secrets, whose values are not written here.
    if _name not in os.environ:
        sys.exit(f"set the variable {{_name}} before you start this script: its value is a secret")
"""
LOAD = """\
with open(Path(__file__).with_name({name!r}), "rb") as _file:
    _VALUES = pickle.load(_file)
"""
MAIN = '''\
def _call_in_ranks():
    """Do what the launcher does in each rank before the call, and call the function."""
    import random

    import torch
    import torch.distributed as dist

    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    seed = {seed}
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads({threads})
{begin}
    {call}
{end}

if __name__ == "__main__":
    _call_in_ranks()
'''
GPU = "    torch.cuda.set_device(local_rank % torch.cuda.device_count())\n"
GROUP = """\
    if not dist.is_initialized():  # It is, under `notebook-launcher launch`.
        alone = {{}} if "RANK" in os.environ else {{"store": dist.HashStore(), "rank": 0, "world_size": 1}}
        dist.init_process_group({backend!r}, **alone)
"""
LEAVE = """\
    if dist.is_initialized():
        dist.destroy_process_group()
"""
ADOPT = """\
    from notebook_launcher.context import adopt

    adopt({settings})
"""
ALIKE = """\
    from notebook_launcher.context import RandomStage, enter_random_stage, newest_seeding

    enter_random_stage(RandomStage(torch.initial_seed(), seeding=newest_seeding()))
"""
IN_SCRIPT = (
    {"num_processes", "nodes", "processes_per_node", "devices", "backend", "threads_per_process"}
    | {"seed", "rank_seeds", "setup", "env"}
    | {field.name for field in dataclasses.fields(TrainingSettings)}
)
"""Options that the script carries out itself, or that are among the words of every command."""
BY_VARIABLE = ("mixed_precision", "gradient_accumulation_steps")
"""Settings for training that Accelerate's variables carry; only this package's Accelerator adopts the others."""


def script_text(needs: Needs, plan: Plan, *, call: str, values: str, command: str) -> str:
    """Return the script: `call` is code, `values` the name of a file, and `command` runs the script."""
    imports = ["import os", "import sys", *(["import pickle", "from pathlib import Path"] if needs.values else [])]
    definitions = "\n\n".join(needs.definitions.values())
    begin = (GPU if plan.use_gpu else "") + ("" if plan.backend is None else GROUP.format(backend=plan.backend))
    begin += _adopted(plan)
    uses_package = "notebook_launcher" in "\n".join((definitions, *needs.imports))
    if plan.config.rank_seeds is None and plan.num_processes > 1 and uses_package:
        begin += ALIKE
    main = MAIN.format(
        seed=f"({plan.seed} + rank) % 2**32" if plan.config.rank_seeds == "apart" else plan.seed,
        threads=plan.threads_per_process,
        begin=begin.rstrip("\n"),
        call=call,
        end="" if plan.backend is None else LEAVE,
    )
    loaded = ""
    if needs.values:
        lines = [f"{name} = _VALUES[{name!r}]" for name in needs.values if name.isidentifier()]
        loaded = LOAD.format(name=values) + "\n".join(lines)
    in_order = ["\n" + definitions, "\n" + loaded] if needs.values_need_definitions else [loaded, "\n" + definitions]
    parts = [
        f"{MARK}\n# {command}\n",
        "\n".join(sorted(imports)) + "\n",
        _set_variables(plan),
        "\n".join(sorted(needs.imports)) + "\n",
        "\n".join(f"{name} = {text}" for name, text in needs.constants.items()),
        *in_order,
        "\n" + main,
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part.strip())


def _set_variables(plan: Plan) -> str:
    """Return the lines that set the variables, and that ask for those whose values are secrets."""
    config, secret = plan.config, secret_variables(plan)
    given = {PRECISION_VARIABLE: config.mixed_precision, STEPS_VARIABLE: config.gradient_accumulation_steps}
    variables = {name: str(value) for name, value in given.items() if value is not None}
    if not plan.use_gpu:
        variables["ACCELERATE_USE_CPU"] = "true"
    elif isinstance(config.devices, tuple):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.devices))
    variables |= config.env
    lines = [f"os.environ.setdefault({n!r}, {text!r})" for n, text in variables.items() if n not in secret]
    return "\n".join([*lines, REQUIRE.format(names=secret)] if secret else lines)


def secret_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of variables that whoever runs the script has to set, because their values are secrets."""
    return tuple(name for name, value in plan.config.env.items() if is_secret(name, value))


def _adopted(plan: Plan) -> str:
    settings = plan.config.training_settings()
    given = {
        field.name: value
        for field in dataclasses.fields(settings)
        if field.name not in BY_VARIABLE and (value := getattr(settings, field.name)) is not None
    }
    named = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return ADOPT.format(settings=named) if given else ""


def torchrun_words(plan: Plan, script: Path) -> list[str]:
    """Return the command that runs the script under torchrun."""
    restarts = [f"--max-restarts={plan.config.max_restarts}"] if plan.config.max_restarts else []
    return ["torchrun", "--standalone", f"--nproc-per-node={plan.num_processes}", *restarts, script.name]


def launch_words(plan: Plan, script: Path) -> list[str]:
    """Return the command that runs the script under `notebook-launcher launch`, with the options that are the run's."""
    words = ["notebook-launcher", "launch", "-n", str(plan.num_processes), *([] if plan.use_gpu else ["--cpu"])]
    for name, value in run_options(plan).items():
        if name == "tags":
            words += [word for tag in value for word in ("--tag", tag)]
        elif name != "debug":  # There, as for Accelerate, --debug compares shapes.
            words += [f"--{name}"] if value is True else [f"--{name}", "none" if value is None else str(value)]
    return [*words, script.name]


def run_options(plan: Plan) -> dict[str, Any]:
    """Return the given options that belong to the run, so that the script cannot hold them."""
    return {name: value for name, value in changed_options(plan.config).items() if name not in IN_SCRIPT}


def job_text(plan: Plan, script: Path, options: Mapping[str, Any]) -> str:
    """Return a job for Slurm; `options` are sbatch's, by name with `_` or `-`, and win over those chosen here."""
    chosen: dict[str, Any] = {
        "job-name": script.stem,
        "nodes": 1,
        "ntasks-per-node": 1,
        "cpus-per-task": plan.num_processes * plan.threads_per_process,
        **({"gpus-per-node": plan.num_processes} if plan.use_gpu else {}),
        "output": "%x-%j.log",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    if plan.config.timeout is not None and "time" not in chosen:
        chosen["time"] = max(1, -(-int(plan.config.timeout) // 60))  # in minutes
    lines = [f"#SBATCH --{name}" + ("" if value is True else f"={value}") for name, value in chosen.items()]
    words = [sys.executable, "-m", "torch.distributed.run", *torchrun_words(plan, script)[1:]]
    enter, run = f"cd {shlex.quote(str(script.parent))}", f"exec {shlex.join(words)}"
    return "\n".join(["#!/bin/bash", *lines, MARK, "set -e", enter, run, ""])


# --------------------------------------------------------------------------------------------------------------------
# A trial of an exported script: its definitions run once, in a process of their own; the function is not called.


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
