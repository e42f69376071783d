"""JupyterLab or Notebook 7 in a real headless Chromium, on a folder of its own.

with Lab(folder, {"a.ipynb": ["1 + 1"]}) as lab:
page = lab.open("a.ipynb")
lab.run(page, 0)
assert lab.output(page, 0).inner_text() == "2"
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import psutil
import pytest

from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from playwright.sync_api import Browser, Locator, Page

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
"""The first of these that is installed; the shell opens a page of JupyterLab with a quarter less of processor time."""
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE_MS = 30_000
"""Milliseconds to wait for an element: a busy machine is slow to show a page."""

PROMPT = "document.querySelectorAll('.jp-Notebook .jp-CodeCell')[at]?.querySelector('.jp-InputPrompt')?.innerText"


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run Debian's Chromium; without it, skip the test."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        try:
            yield opened
        finally:
            opened.close()


def write_notebook(file: Path, cells: Sequence[str]) -> None:
    """Write a notebook with these cells of code."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    code = [nbformat.v4.new_code_cell(cell.strip("\n"), id=f"cell-{at}") for at, cell in enumerate(cells)]
    nbformat.write(nbformat.v4.new_notebook(cells=code, metadata={"kernelspec": kernel}), file)


class Lab:
    """A Jupyter server and the pages that a browser has open on it."""

    def __init__(
        self,
        chromium: Browser,
        folder: Path,
        notebooks: Mapping[str, Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._chromium = chromium
        self._folder = folder / "notebooks"
        self._folder.mkdir(parents=True)
        self._runtime = folder / "runtime"
        for name, cells in notebooks.items():
            write_notebook(self._folder / name, cells)
        self._log = (folder / "server.log").open("wb")
        command = [
            *(sys.executable, "-m", "jupyterlab"),
            *("--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"),
            *("--IdentityProvider.token=", f"--ServerApp.root_dir={self._folder}", "--LabApp.news_url="),
            *("--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.expose_app_in_browser=True"),
            "--JupyterNotebookApp.expose_app_in_browser=True",
        ]
        self._server = subprocess.Popen(
            command, env=self._environ(folder, env or {}), stdout=self._log, stderr=subprocess.STDOUT
        )
        self._context: Any = None

    def _environ(self, folder: Path, env: Mapping[str, str]) -> dict[str, str]:
        settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}', encoding="utf-8")
        page = folder / "config" / "labconfig"
        page.mkdir(parents=True)
        # Otherwise each page that is opened has the server run node to see if JupyterLab could be built: 0.6 s.
        (page / "page_config.json").write_text('{"buildCheck": false, "buildAvailable": false}', encoding="utf-8")
        return {
            **os.environ,
            "JUPYTER_RUNTIME_DIR": str(self._runtime),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            **env,
        }

    def __enter__(self) -> Lab:
        try:
            self._url = self._wait_for_server()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_server(self) -> str:
        file = self._runtime / f"jpserver-{self._server.pid}.json"
        for _ in range(600):
            with contextlib.suppress(OSError, ValueError):
                return str(json.loads(file.read_text(encoding="utf-8"))["url"])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(0.1)
                break
        log = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        msg = f"the server did not come up:\n{log[-4000:]}"
        raise RuntimeError(msg)

    def close(self) -> None:
        """Close the pages, end the kernels and the server."""
        if self._context is not None:
            self._context.close()
        processes = psutil.Process(self._server.pid).children(recursive=True) if self._server.poll() is None else []
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._log.close()

    def kill(self) -> None:
        """Kill the server and its kernels, as the end of their machine's session does; the pages stay open."""
        family = [psutil.Process(self._server.pid), *psutil.Process(self._server.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._server.wait()
        psutil.wait_procs(family)

    def open(self, name: str, *, app: str = "lab", width: int = 1200, height: int = 900) -> Page:
        """Open a notebook in a page of its own, of JupyterLab or of "notebook", and wait until its kernel is idle."""
        if self._context is None:
            self._context = self._chromium.new_context()
        page: Page = self._context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.set_viewport_size({"width": width, "height": height})
        self.show(page, name, app=app)
        return page

    def close_pages(self, *, end_kernels: bool = False) -> None:
        """Close all pages, since one that shows a live monitor takes processor time; their kernels may live on."""
        pages = [] if self._context is None else self._context.pages
        if end_kernels and pages:
            # The page may know of sessions that have ended already.
            pages[0].evaluate("() => jupyterapp.serviceManager.sessions.shutdownAll().catch(() => {})")
        for page in pages:
            page.close()

    def show(self, page: Page, name: str, *, app: str = "lab") -> None:
        """Load a notebook, as a reload of the page does."""
        where = f"lab/tree/{name}?reset" if app == "lab" else f"notebooks/{name}"
        page.goto(self._url + where)
        self._wait_for_kernel(page)

    def show_instead(self, page: Page, name: str) -> None:
        """Close the notebook of a page of JupyterLab and open another one, without the seconds of loading a page."""
        change = """async (path) => {
            jupyterapp.shell.currentWidget.close();
            await jupyterapp.commands.execute("docmanager:open", { path });
        }"""
        page.evaluate(change, name)
        self._wait_for_kernel(page)

    def _wait_for_kernel(self, page: Page) -> None:
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        # A cell that is run before the kernel reports that it is idle loses its [*] again.
        page.wait_for_function(
            # The server answers with an error while a kernel that it lists ends.
            "async () => [].concat(await (await fetch('/api/kernels')).json())"
            ".some(kernel => kernel.execution_state === 'idle' && kernel.connections > 0)",
            polling=200,
        )
        page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').first.wait_for(state="attached")

    def cell(self, page: Page, at: int) -> Locator:
        """Return a code cell."""
        return page.locator(".jp-Notebook .jp-CodeCell").nth(at)

    def output(self, page: Page, at: int) -> Locator:
        """Return the outputs of a code cell."""
        return self.cell(page, at).locator(".jp-OutputArea-output")

    def start(self, page: Page, at: int) -> None:
        """Run a cell and return once it runs."""
        before = self.cell(page, at).locator(".jp-InputPrompt").first.inner_text()
        asked: list[str] = []
        for _ in range(5):
            # The first key press after the layout of a page is sometimes lost.
            with contextlib.suppress(TimeoutError, self.timeout()):
                self.cell(page, at).locator(".cm-content").first.click(timeout=10_000)
                page.keyboard.press("Shift+Enter")
                page.wait_for_function(f"([at, before]) => {PROMPT} !== before", arg=[at, before], timeout=3000)
                return
            # On a busy machine JupyterLab opens dialogs of its own, and the page waits for an answer.
            asked += page.locator("dialog").all_inner_texts()
            page.keyboard.press("Escape")
        msg = f"cell {at} does not run; dialogs: {asked}"
        raise AssertionError(msg)

    def run(self, page: Page, at: int) -> None:
        """Run a cell and wait until it has ended."""
        self.start(page, at)
        if not self.wait(page, at):
            self.start(page, at)
            assert self.wait(page, at), f"cell {at} lost its prompt twice"

    def wait(self, page: Page, at: int) -> bool:
        """Wait until a cell has ended. Return False if the page lost track of the run."""
        page.wait_for_function(f"([at]) => /\\[(\\d+| )\\]/.test({PROMPT})", arg=[at])
        return "[ ]" not in self.cell(page, at).locator(".jp-InputPrompt").first.inner_text()

    @staticmethod
    def timeout() -> type[Exception]:
        """Return the error of an element that does not come."""
        from playwright.sync_api import TimeoutError as Timeout

        return Timeout

    def save(self, page: Page, name: str) -> Any:
        """Save the notebook and return the content of its file."""
        file = self._folder / name
        before = file.stat().st_mtime_ns
        page.keyboard.press("Control+s")
        for _ in range(200):
            # The server empties the file before it writes it.
            with contextlib.suppress(nbformat.reader.NotJSONError):
                if file.stat().st_mtime_ns != before:
                    return nbformat.read(file, as_version=4)
            page.wait_for_timeout(50)
        msg = f"{name} was not saved"
        raise AssertionError(msg)

    def copy(self, notebook: Any, name: str) -> None:
        """Write a notebook with its outputs under another name."""
        nbformat.write(notebook, self._folder / name)
