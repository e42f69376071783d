"""VS Code's own widget manager, `@vscode/jupyter-ipywidgets8`, in a bare page with a real kernel.

The page is JupyterLab's, emptied: it has the client of kernels that VS Code's extension has, too. What VS Code does
around its widget manager, such as the question for downloads, is not here.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hosted import HOSTED, TRAIN, installed, pause
from tests.support.lab import Lab, browser

if TYPE_CHECKING:
    from playwright.sync_api import Route

MODULES = HOSTED / "vscode/node_modules"
SCRIPTS = {
    "require": MODULES / "requirejs/require.js",
    "vscode": MODULES / "@vscode/jupyter-ipywidgets8/dist/ipywidgets.js",
    "anywidget": Path(sys.prefix, "share/jupyter/nbextensions/anywidget/index.js"),
}
CELLS = [TRAIN + "ConfigPanel(train, num_processes=2)", "notebook_launch(train, 2)"]
# As VS Code's extension: it loads a widget's scripts by require.js, and shows each display's view in an element.
START = """async ([cells]) => {
    const log = (window.LOG = []);
    const add = (url, type) => new Promise((loaded, failed) => document.head.append(Object.assign(
        document.createElement("script"), { src: url, type, onload: loaded, onerror: failed })));
    document.body.replaceChildren();
    await add("/scripts/require", "");
    (await import("/scripts/vscode")).activate();
    window.vscIPyWidgets8.load();
    const kernel = (window.KERNEL = await jupyterapp.serviceManager.kernels.startNew({ name: "python3" }));
    const known = new Set();
    const loader = {
        widgetsRegisteredInRequireJs: known,
        errorHandler: (...told) => log.push(["not loaded", ...told.map(String)]),
        successHandler: () => {},
        loadWidgetScript: async (name) => {
            const script = await new Promise((found, failed) => require([`/scripts/${name}`], found, failed));
            define(name, [], () => script);
            known.add(name);
            await new Promise((found, failed) => require([name], found, failed));
        },
    };
    const manager = new window.vscIPyWidgets.WidgetManager(kernel, document.body, loader, () => {});
    const show = async ({ header, content }) => {
        const view = content.data?.["application/vnd.jupyter.widget-view+json"];
        if (header.msg_type === "error") log.push([content.ename, content.evalue]);
        if (!view || header.msg_type === "update_display_data") return;
        const node = document.createElement("div");
        document.body.append(node);
        const model = await manager.get_model(view.model_id);
        await manager.display_view({}, await manager.create_view(model, { el: node }), { node });
    };
    for (const code of cells) {
        const cell = kernel.requestExecute({ code });
        cell.onIOPub = (message) => show(message).catch((error) => log.push(["not shown", String(error)]));
        if (code !== cells.at(-1)) await cell.done;
    }
}"""


def serve(file: Path, route: Route) -> None:
    route.fulfill(path=file, content_type="text/javascript")


@installed("vscode")
@pytest.mark.slow
@pytest.mark.leaks("the server, its kernel and the browser are ended at the end")
def test_widget_manager_of_vscode_draws_panel_and_monitor_and_pause_works(tmp_path):
    with browser() as chromium, Lab(chromium, tmp_path, {"empty.ipynb": ["1"]}) as lab:
        page = lab.open("empty.ipynb", height=1600)
        for name, file in SCRIPTS.items():
            page.route(f"**/scripts/{name}", functools.partial(serve, file))
        page.evaluate(START, [CELLS])
        page.get_by_role("button", name="Launch").first.wait_for()
        pause(page)
        assert page.evaluate("() => window.LOG") == []
        page.evaluate("() => window.KERNEL.shutdown()")
