"""Requests of a monitor's page to the run: stop, save, pause, stacks, samples, profiles and settings."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

from notebook_launcher.widgets.monitor.page_items import profile_item, sample_item

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.history.schema import RunReader
    from notebook_launcher.kernel.run.handle import AnyRun
    from notebook_launcher.widgets.monitor.feed import Feed

MAX_TYPED = 200
"""Characters of a setting's name and of its new value."""


class PageRequests:
    """The requests about one run; what comes of each goes to the page by the feed.

    Args:
        run: The run; a page can act on live ones alone.
        feed: The feed of the page.
        lock: Held while the feed changes.
    """

    def __init__(self, run: RunReader, feed: Feed, lock: threading.RLock) -> None:
        self._run = cast("AnyRun", run)
        self._feed = feed
        self._lock = lock
        self._busy_with: set[str] = set()
        """Names of the requests that are carried out in threads."""

    def carry_out(self, kind: object, content: dict[str, Any], answered: Callable[[], None]) -> None:
        """Carry out a request; never blocks. What is no request is ignored.

        Args:
            kind: The request's name.
            content: The page's message.
            answered: Called after a notice for the user was added to the feed.
        """
        run = self._run

        def attempt(act: Callable[[], str | None]) -> None:
            self._attempt(act, answered)

        match kind:
            case "stop":
                attempt(lambda: run.stop(after_step=True, wait=False))
            case "interrupt":
                attempt(lambda: run.stop(wait=False))
            case "stacks":
                self._in_thread("stacks", lambda: attempt(lambda: str(run.stacks())))
            case "save":
                self._in_thread("save", lambda: attempt(run.save))
            case "pause" | "resume" as name:
                self._in_thread(name, lambda: attempt(getattr(run, name)))
            case "sample" | "profile" as name:
                self._in_thread(name, lambda: self._measure(name, content.get("amount")))
            case "set":
                setting, text = (str(content.get(key, ""))[:MAX_TYPED] for key in ("name", "value"))
                self._in_thread(f"set {setting}", lambda: self._set(setting, text))

    def read(self, kind: str, content: dict[str, Any], answered: Callable[[], None]) -> None:
        """Carry out a request that reads all values, of live and of recorded runs: a zoom, or a file; never blocks."""
        key, low, high = str(content.get("key", "")), content.get("low"), content.get("high")

        def work() -> None:
            with self._lock:
                if kind == "csv":
                    self._feed.offer_csv(str(content.get("page", "")))
                elif isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
                    self._feed.zoom(key, low, high)
            answered()

        self._in_thread(f"{kind} {key}", work)

    def _set(self, name: str, text: str) -> None:
        """Change a setting to what was typed. An error is shown beside the field."""
        problem = ""
        try:
            self._run.set_from_page(name, text)
        except Exception as error:  # whatever it is, the page shows it
            problem = str(error)
        with self._lock:
            self._feed.answer(name, problem)

    def _measure(self, kind: str, amount: Any) -> None:
        """Sample for some seconds, or profile some updates; send what was found, or the reason why nothing was."""
        run = self._run
        try:
            item = sample_item(run.sample(amount)) if kind == "sample" else profile_item(run.profile(amount))
        except Exception as error:  # whatever it is, the page shows it
            item = {"kind": kind, "drawing": "", "tables": [], "problem": str(error)}
        with self._lock:
            self._feed.finding(item)

    def _attempt(self, act: Callable[[], str | None], answered: Callable[[], None]) -> None:
        """Do what was asked for. An error becomes a notice, because no cell would show it."""
        try:
            answer = act()
        except Exception as error:  # whatever it is, the page shows it
            answer = f"{type(error).__name__}: {error}"
        if answer:
            with self._lock:
                self._feed.notice(answer)
            answered()

    def _in_thread(self, name: str, act: Callable[[], object]) -> None:
        """Do something in a thread, because it waits for the ranks; one request of each name at a time."""
        with self._lock:
            if name in self._busy_with:
                return
            self._busy_with.add(name)

        def work() -> None:
            try:
                act()
            finally:
                self._busy_with.discard(name)

        threading.Thread(target=work, name=f"notebook-launcher monitor {name}", daemon=True).start()
