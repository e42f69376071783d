"""`runs`: list, show, compare and delete the runs that have left a folder."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.command_line.parser import (
    Command,
    Parser,
    choice,
    positive_number,
    whole_number_reader,
    words_of,
)
from notebook_launcher.errors import ConfigError, check_rank
from notebook_launcher.wording import clean, plural

if TYPE_CHECKING:
    import argparse

NUM_LISTED = 16
CHOICES = ("name", "tag", "state", "kind")
"""Options that choose runs as `RunList.filter` does."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    here = Parser(add_help=False)
    here.add_argument("--folder", default="auto", metavar="FOLDER", help="the folder that holds the runs' folders")
    some = Parser(add_help=False)
    some.add_argument("--name", metavar="WORDS", help="runs whose name or function contains these words")
    some.add_argument("--tag", metavar="TAG", help="runs with this tag")
    some.add_argument("--state", reads=_state, metavar="STATE", help="runs in this state, such as done or failed")
    some.add_argument("--kind", reads=_kind, metavar="KIND", help="run: launches alone; or call, cell, session")
    some.add_argument(
        "--days", reads=positive_number, metavar="N", help="runs of the last N days; with delete, older runs"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    parser.set_defaults(act=_list, folder="auto", days=None, limit=NUM_LISTED, **dict.fromkeys(CHOICES))
    action = actions.add_parser("list", help="a table of the runs, the newest first", parents=[here, some])
    rows = f"rows; {NUM_LISTED} if omitted"
    action.add_argument("--limit", reads=whole_number_reader(1), default=NUM_LISTED, metavar="N", help=rows)
    action = actions.add_parser("show", help="one run: ranks, metrics, failures, output", parents=[here])
    action.set_defaults(act=_show)
    action.add_argument("run", metavar="ID", help="its id, the beginning of its id, or `last`")
    action.add_argument("--logs", nargs="?", const="all", metavar="RANK", help="the output of a rank, or of all ranks")
    action.add_argument("--all", action="store_true", help="list all options, also those with their default")
    action = actions.add_parser(
        "compare", help="settings, speed, memory and last metrics of several runs", parents=[here]
    )
    action.set_defaults(act=_compare)
    action.add_argument("runs", nargs="+", metavar="ID", help="ids, beginnings of ids, or `last`")
    action = actions.add_parser("edit", help="change the name, tags or notes of a run", parents=[here])
    action.set_defaults(act=_edit)
    action.add_argument("run", metavar="ID", help="its id, the beginning of its id, or `last`")
    action.add_argument("--name", metavar="NAME")
    action.add_argument("--tags", nargs="*", metavar="TAG", help="all tags of the run; none: remove them")
    action.add_argument("--notes", metavar="TEXT")
    action = actions.add_parser("delete", help="remove the folders of runs that are over", parents=[here, some])
    action.set_defaults(act=_delete)
    which = "ids, beginnings of ids, or `last`; without them, --name, --tag, --state, --kind or --days choose"
    action.add_argument("runs", nargs="*", metavar="ID", help=which)
    action.add_argument("--yes", action="store_true", help="do not ask")


def _state(text: str) -> str:
    from notebook_launcher.drawing.legend import RUN_STATES

    return choice([*RUN_STATES])(text)


def _kind(text: str) -> str:
    from notebook_launcher.archive.listing import RUN_KINDS

    return choice(RUN_KINDS)(text)


def _list(options: argparse.Namespace) -> int:
    from notebook_launcher.detached.attaching import runs
    from notebook_launcher.drawing.tables import terminal_width

    seconds = None if options.days is None else 86_400 * options.days
    chosen = runs(options.folder).filter(**{name: getattr(options, name) for name in CHOICES}, within=seconds)
    print(chosen.as_text(options.limit, width=terminal_width(), more=f"--limit {len(chosen)}"))
    return 0


def _show(options: argparse.Namespace) -> int:
    from notebook_launcher.archive.listing import open_run
    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.drawing.run_picture import plain_settings, static_text
    from notebook_launcher.drawing.tables import terminal_width
    from notebook_launcher.history.curves import Curves

    run = open_run(options.run, options.folder)
    snapshot, curves = run.snapshot(), Curves()
    curves.fold(run.metrics)
    lines = [static_text(snapshot, curves, terminal_width()), "", f"folder: {run.folder}"]
    lines += [f"name: {run.name}", *([f"notes: {run.notes}"] if run.notes else [])]
    if commit := run.environment.get("git", {}).get("commit"):
        lines.append(f"git commit: {commit}")
    settings, defaults = plain_settings(snapshot), dict[str, str]()
    if not options.all:
        config = LaunchConfig()
        usual = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        defaults = plain_settings(dataclasses.replace(snapshot, arguments={}, config=usual))
    chosen = {name: value for name, value in settings.items() if defaults.get(name) != value}
    lines += [f"{name}: {value}" for name, value in chosen.items()]
    if num_left_out := len(settings) - len(chosen):
        lines.append(f"{plural(num_left_out, 'option')} with the default: --all lists them too")
    for rank in _ranks(options.logs, snapshot.num_processes):
        lines += ["", f"rank {rank}:", *run.logs(rank).splitlines()]
    text = "\n".join(lines)
    # A folder from elsewhere could hold what makes a terminal do things.
    print(clean(text, len(text)))
    return 0


def _ranks(chosen: str | None, num_processes: int) -> range:
    if chosen is None:
        return range(0)
    if chosen == "all":
        return range(num_processes)
    if not chosen.isdecimal():
        raise ConfigError(f"--logs {chosen}: it takes the number of a rank, or all.")
    rank = check_rank(int(chosen), num_processes, typed="--logs")
    return range(rank, rank + 1)


def _compare(options: argparse.Namespace) -> int:
    from notebook_launcher.archive.listing import open_run
    from notebook_launcher.widgets.runs.comparison import compare

    if len(options.runs) < 2:
        (one,) = options.runs
        raise ConfigError(
            f"compare {one}: it takes two runs or more. `notebook-launcher runs show {one}` shows one run."
        )
    print(compare(*(open_run(name, options.folder) for name in options.runs)))
    return 0


def _edit(options: argparse.Namespace) -> int:
    from notebook_launcher.archive.listing import open_run

    run = open_run(options.run, options.folder)
    tags = None if options.tags is None else words_of(options.tags)
    run.edit(name=options.name, tags=tags, notes=options.notes)
    print(clean(f"{run.id}: {run.name}; tags: {', '.join(run.tags) or 'none'}; notes: {run.notes or 'none'}"))
    return 0


def _delete(options: argparse.Namespace) -> int:
    from notebook_launcher.archive.listing import RunList, open_run
    from notebook_launcher.detached.attaching import runs, stop_hosted
    from notebook_launcher.drawing.tables import terminal_width
    from notebook_launcher.wording import format_bytes

    every = runs(options.folder)
    if options.runs:
        chosen = RunList(every.home, [open_run(name, options.folder) for name in options.runs], stop_hosted)
    elif options.name is options.tag is options.state is options.kind is options.days is None:
        raise ConfigError("name the runs to delete, or choose them with --name, --tag, --state, --kind or --days.")
    else:
        older = None if options.days is None else 86_400 * options.days
        fits = {name: getattr(options, name) for name in CHOICES}
        chosen = every.filter(**fits, before=older)
    if not chosen:
        print("no such run")
        return 1
    if not options.yes:
        listed = f"runs list --limit {len(every)}"
        print(chosen.as_text(NUM_LISTED, width=terminal_width(), more=listed))
        try:
            answer = input(f"Delete {plural(len(chosen), 'run')}, {format_bytes(chosen.size)}? [y/N] ")
        except EOFError:
            raise ConfigError(
                "nothing is deleted: the input has ended before an answer. Pass --yes to delete without a question."
            ) from None
        if answer.lower() not in ("y", "yes"):
            return 1
    freed = chosen.size
    print(f"deleted {plural(chosen.delete(), 'run')}, {format_bytes(freed)}")
    return 0


COMMAND = Command(
    name="runs",
    summary="list, show, compare and delete the runs that have left a folder",
    description="""\
Runs leave a folder with their settings, metrics and output: runs of notebooks and runs of `launch`.

  notebook-launcher runs                                  the newest runs
  notebook-launcher runs list --state failed --days 7
  notebook-launcher runs list --kind run                  launches alone, without calls and cells of sessions
  notebook-launcher runs show last --logs 0
  notebook-launcher runs compare 20261121-14 20261121-15
  notebook-launcher runs delete --state failed --days 30  failed runs that are older than 30 days""",
    add_arguments=_add_arguments,
    run=lambda options: int(options.act(options)),
)
