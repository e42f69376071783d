"""Processes that write to the log, their order, and repeated messages."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import compat
from notebook_launcher.training.recording.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def name() -> Iterator[str]:
    yield "notebook_launcher.tests.logger"
    logging.getLogger("notebook_launcher.tests.logger").setLevel(logging.NOTSET)


@pytest.mark.parametrize("method", ["warning", "warning_once", "error", "critical"])
def test_record_shows_the_line_that_logged(name, caplog, method):
    line = sys._getframe().f_lineno + 1
    getattr(get_logger(name), method)("here")
    get_logger(name).log(logging.ERROR, "here")
    first, second = caplog.records
    assert (first.filename, first.lineno, second.lineno) == ("test_training_logging.py", line, line + 1)


def test_level_is_that_logger_s_own(name, caplog):
    root = logging.getLogger().level
    for level in ("DEBUG", "info", logging.ERROR):
        logger = get_logger(name, level)
        logger.debug("d, %s", level)
        logger.info("i, %s", level)
    assert [record.args for record in caplog.records] == [("DEBUG",), ("DEBUG",), ("info",)]
    assert logging.getLogger().level == root


def test_warning_is_given_once(name, caplog):
    logger = get_logger(name)
    for number in (1, 1, 2):
        logger.warning_once("number %d", number)
    logger.warning_once("number %d", 1, main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == [f"[RANK 0] number {number}" for number in (1, 2, 1)]


def speak(path, **options):
    logger = logging.getLogger("notebook_launcher.tests.ranks")
    handler = logging.FileHandler(path)
    logger.addHandler(handler)
    try:
        get_logger(logger.name).warning("hello from %s", os.environ["RANK"], **options)
    finally:
        logger.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize(
    ("options", "speakers"), [({}, {0}), ({"main_process_only": False}, {0, 1, 2}), ({"in_order": True}, [0, 1, 2])]
)
def test_options_choose_the_ranks_that_log(ranks, tmp_path, options, speakers):
    ranks.run(3, lambda: speak(tmp_path / "log", **options))
    lines = (tmp_path / "log").read_text().splitlines()
    expected = [f"[RANK {rank}] hello from {rank}" for rank in speakers]
    assert lines == expected or (isinstance(speakers, set) and sorted(lines) == expected)


def test_in_compat_a_stacklevel_counts_the_logger_too(name, caplog):
    def speaker(**stacklevel):
        compat.get_logger(name).warning("here", **stacklevel)

    def caller():
        speaker()
        speaker(stacklevel=2)
        speaker(stacklevel=3)

    caller()
    assert [record.funcName for record in caplog.records] == ["speaker", "speaker", "caller"]
