"""A browser for all tests, a page of it for those of a file, and the monitor in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.lab import browser
from tests.support.monitor_page import open_tab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from tests.support.monitor_page import Tab


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """One browser for all files, because each one takes a second of processor time to start."""
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def window(chromium: Browser) -> Iterator[Page]:
    """One page for all tests of a file, so that the page's processes do not count as leaks of a test."""
    page = chromium.new_page()
    page.set_default_timeout(6000)
    yield page
    page.close()


@pytest.fixture
def tab(window: Page, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """The monitor in that page, with the part open that a file of tests is about, its `PART`."""
    with open_tab(window, getattr(request.module, "PART", "")) as opened:
        yield opened
