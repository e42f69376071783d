"""The panel, the monitor and cells on ranks as a user has them: JupyterLab and Notebook 7 in a real browser.

A page, a kernel and a launch cost seconds of processor time each: every test leads one notebook through its life.

`NOTEBOOK_LAUNCHER_PICTURES=docs/pictures` keeps the pictures that the README shows.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
pytestmark += [pytest.mark.leaks("the server, its kernels and the browser serve several tests")]

TRAIN = """
def train(lr: float = 0.003, batch_size: int = 32, epochs: int = 2, pause: float = 0.0):
    import time
    from notebook_launcher import report
    for epoch in range(epochs):
        for step in range(10):
            report(step=10 * epoch + step, loss=1 / (1 + step), accuracy=0.1 * step)
            time.sleep(pause)
        print(f"epoch {epoch}: done", flush=True)
"""
TRAIN_A_MODEL = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from notebook_launcher import Accelerator

images = torch.rand(1800, 64)
labels = images.unflatten(1, (8, 8))[:, :2, :5].sum(1).argmax(1)

def train(lr: float = 0.003, batch_size: int = 32, epochs: int = 2, pause: float = 0.0):
    import time
    accelerator = Accelerator()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                scores = model(batch)
                loss = torch.nn.functional.cross_entropy(scores, targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accuracy = (scores.argmax(1) == targets).float().mean()
            accelerator.log({"loss": loss, "accuracy": accuracy})
            time.sleep(pause)
        print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    return accuracy.item()
"""
FAIL = """
def train():
    import os
    if os.environ["RANK"] == "1":
        raise ValueError("rank one <b>gave up</b>")
    import torch.distributed as dist
    dist.barrier()
"""
PANEL = "from notebook_launcher.widgets import ConfigPanel\npanel = ConfigPanel(train, num_processes=2); panel"
BUSY = (
    "from notebook_launcher import notebook_launch\nnotebook_launch(train, 2, kwargs={'epochs': 10**6, 'pause': 0.01})"
)
MONITORS = [
    TRAIN,
    BUSY,
    "print('free again')",
    BUSY.replace("10**6, 'pause': 0.01", "2, 'pause': 0.1"),
    "from notebook_launcher import runs\nfrom notebook_launcher.widgets import Monitor\nMonitor(runs()[0])",
    BUSY,
]
PANELS = [
    TRAIN,
    PANEL,
    "from notebook_launcher import compare, runs\nruns()",
    "compare(runs()[0])",
    BUSY.replace("notebook_launch(", "launch(").replace("import notebook_launch", "import launch"),
    "import os; os.kill(os.getpid(), 9)",
]
RANKS = [
    """from notebook_launcher import Session
session = Session(2, devices="cpu", monitor=False)
session.activate()
session.execute("import time, ipywidgets as w, torch.distributed as dist; rank = dist.get_rank()")""",
    """%%ranks
s = w.IntSlider(3, description="rate")
b = w.Button(description="stop")
stop = []
b.on_click(lambda _: stop.append(1))
w.HBox([s, b])""",
    """%%ranks 0
from tqdm.notebook import tqdm
seen = [s.value]
for _ in tqdm(range(2000), desc="busy"):
    time.sleep(0.05)
    if seen[-1] != s.value:
        seen.append(s.value)
    if stop:
        break
print("saw", seen[0], seen[-1])""",
    """%%ranks --display all
from IPython.display import HTML
HTML(f"<b>table {rank}</b>")""",
    """%%ranks
factor = rank * 10
1 / factor if rank else 1 / 0""",
    "%debug",
    "session.close()",
]
NOTEBOOKS = {
    "monitors.ipynb": MONITORS,
    "panels.ipynb": PANELS,
    "ranks.ipynb": RANKS,
    "panel.ipynb": [TRAIN_A_MODEL, PANEL, "panel.results"],
}
# Contrast of each visible text by WCAG 2.1, and the pixels by which elements overflow the panel at its right.
LOOK = """() => {
    const panel = document.querySelector(".nbp-panel");
    const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const paint = (colors) => {
        context.clearRect(0, 0, 1, 1);
        for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    };
    const light = (color) => color
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const seen = [...panel.querySelectorAll("*")].filter((one) => one.checkVisibility() && one.tagName !== "OPTION");
    const said = seen.filter((one) => !one.disabled && (one.value || one.placeholder || [...one.childNodes].some(
        (node) => node.nodeType === Node.TEXT_NODE && node.data.trim())));
    const contrast = (one) => {
        const grounds = [];
        for (let at = one; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
        const of = one.placeholder && !one.value ? "::placeholder" : null;
        const [low, high] = [paint(grounds), paint([...grounds, getComputedStyle(one, of).color])].map(light).sort();
        return (high + 0.05) / (low + 0.05);
    };
    const edge = panel.getBoundingClientRect().right;
    const rightOf = (one) => one.getBoundingClientRect().right - edge;
    return {
        poor: said.map((one) => [contrast(one), one.className, one.textContent || one.value || one.placeholder])
            .filter(([ratio]) => ratio < 4.5),
        texts: said.length,
        outside: seen.filter((one) => rightOf(one) > 1).map((one) => [rightOf(one), one.tagName, one.className]),
        width: panel.clientWidth,
    };
}"""


@pytest.fixture(scope="module")
def lab(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(chromium, tmp_path_factory.mktemp("lab"), NOTEBOOKS) as opened:
        yield opened


@pytest.fixture(autouse=True)
def closed_pages(lab: Lab) -> Iterator[None]:
    yield
    lab.close_pages(end_kernels=True)  # Kernels that the check for leaks ends are restarted by their server.


def monitor_of(page: Page) -> Locator:
    return page.locator(".nbl-monitor").last


def picture(page: Page, what: Locator, name: str) -> None:
    folder = os.environ.get("NOTEBOOK_LAUNCHER_PICTURES")
    if folder:
        page.wait_for_timeout(500)
        what.screenshot(path=Path(folder) / name)


def drawing(page: Page) -> str:
    """Return what the last plot in sight shows; empty before anything is drawn."""
    look = "() => [...document.querySelectorAll('.nbl-plots .nbl-plot-canvas canvas')].at(-1)?.toDataURL() ?? ''"
    return str(page.evaluate(look))


def wait_for_other_drawing(page: Page, than: str) -> str:
    # Curves are drawn where they can be seen.
    page.locator(".nbl-plots .nbl-plot-canvas").last.scroll_into_view_if_needed()
    for _ in range(100):
        now = drawing(page)
        if now not in ("", than):
            return now
        page.wait_for_timeout(100)
    pytest.fail("the curves are not drawn, or do not change")


NAME = """() => {
    const at = document.activeElement;
    return at.labels?.[0]?.textContent || at.getAttribute("aria-label") || at.textContent || at.title;
}"""


# Return true if a control is marked as invalid (or not) and described by a text.
DESCRIBED = """([control, invalid, text]) => {
    const by = document.getElementById(control.getAttribute("aria-describedby"));
    return control.getAttribute("aria-invalid") === invalid && Boolean(by?.textContent.includes(text));
}"""


def set_theme(page: Page, name: str) -> None:
    page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
    page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=name)


def wait_for_state(page: Page, state: str) -> None:
    monitor_of(page).locator(".nbl-header .nbl-state-word").get_by_text(state).wait_for()


def show_again(lab: Lab, page: Page, name: str, state: str, *, app: str = "lab") -> None:
    """Load the page again and wait until its last monitor has a state.

    The page gives the kernel 4 s to tell of its widgets, and asks once: what a busy machine tells later is not shown.
    """
    for _ in range(3):
        lab.show(page, name, app=app)
        with contextlib.suppress(lab.timeout()):
            return wait_for_state(page, state)
    pytest.fail(f"the monitor is not shown again as {state}")


def press_shortcuts(page: Page, *controls: Locator) -> None:
    """Press on controls what makes a new cell in JupyterLab, moves to another and cuts it, and find the cells alike."""
    cells = "() => [...document.querySelectorAll('.jp-Cell')].map((cell) => cell.matches('.jp-mod-active'))"
    for control in controls:
        control.focus()
        before = page.evaluate(cells)
        for key in ("b", "ArrowDown", "x", "ArrowUp"):
            control.press(key)
        assert page.evaluate(cells) == before, control


def test_panel_launches_a_run_and_shows_its_monitor(lab):
    page = lab.open("panel.ipynb", app="notebook", height=1900)
    lab.run(page, 0)
    lab.run(page, 1)
    panel = page.locator(".nbp-panel")
    for label, value in {"Accumulation steps": "4", "epochs": "2", "pause": "0.1"}.items():
        panel.get_by_label(label, exact=True).fill(value)
    panel.get_by_text("256", exact=True).wait_for()  # 32 x 4 x 2
    panel.get_by_role("button", name="Launch", exact=True).click()
    wait_for_state(page, "running")
    monitor_of(page).get_by_text("effective batch 32 x 4 x 2 = 256 samples per update").wait_for()
    first = wait_for_other_drawing(page, "")
    wait_for_other_drawing(page, first)
    assert panel.get_by_label("epochs", exact=True).is_hidden()  # One line stands for the fields of a live run.
    folded = "lr 0.003 · Micro-batch size 32 · epochs 2 · pause 0.1 · accumulation steps 4 · 2 ranks"
    panel.get_by_text(folded).wait_for()
    panel.get_by_role("button", name="Edit", exact=True).click()
    panel.get_by_label("epochs", exact=True).wait_for()
    picture(page, panel, "panel.png")

    lab.cell(page, 0).locator(".cm-content").first.click()  # JupyterLab saves nothing from a widget's button.
    lab.save(page, "panel.ipynb")
    show_again(lab, page, "panel.ipynb", "done", app="notebook")
    assert page.locator(".jp-mod-outputsScrolled").count() == 0  # Notebook 7 puts outputs of 1,820 pixels into a box.
    assert monitor_of(page).evaluate("(root) => root.getBoundingClientRect().right <= innerWidth")
    assert "loss" in monitor_of(page).inner_text()
    picture(page, monitor_of(page), "monitor.png")
    lab.run(page, 2)
    assert re.search(r"returned|0\.\d", lab.output(page, 2).inner_text())


def watch_a_busy_cell(lab: Lab, page: Page) -> Locator:
    """Operate the monitor of a run for which cell 1 waits, load the page again, and return the picture kept with it."""
    lab.start(page, 1)
    wait_for_state(page, "running")
    before = wait_for_other_drawing(page, "")
    monitor = monitor_of(page)
    smoothing = monitor.locator(".nbl-field", has_text="Smoothing").get_by_role("slider")
    smoothing.press("ArrowRight")
    assert smoothing.input_value() == "0.01"
    press_shortcuts(page, smoothing, monitor.get_by_label("Horizontal axis"), monitor.locator(".nbl-plot-canvas").last)
    # The picture that is kept in case the kernel dies is older than the monitor: only one of the two is seen.
    old = lab.output(page, 1).locator("summary", has_text="train on 2 ranks: running")
    old.wait_for(state="attached")
    assert not old.is_visible()

    lab.cell(page, 0).locator(".cm-content").first.click()  # The monitor keeps JupyterLab's shortcuts out.
    lab.save(page, "monitors.ipynb")
    show_again(lab, page, "monitors.ipynb", "running")
    wait_for_other_drawing(page, before)
    old.wait_for(state="hidden")
    page.get_by_role("button", name="Dump stacks").last.click()
    monitor_of(page).locator(".nbl-notice").first.wait_for()  # Below all text nobody would see it.
    page.get_by_role("button", name="Stop after this step").last.click()
    wait_for_state(page, "stopped")
    assert not old.is_visible()
    lab.run(page, 2)
    assert "free again" in lab.output(page, 2).inner_text()
    return old


def explore_a_finished_run(lab: Lab, page: Page) -> tuple[Locator, Locator]:
    """Explore the run of cell 3 there and in cell 4, and return what replaces its monitors without a kernel."""
    lab.run(page, 3)
    wait_for_state(page, "done")
    explored = lab.output(page, 3).locator("[data-nbl-explore] .nbl-monitor")
    assert wait_for_other_drawing(page, "")
    # It stays where the monitor was, above the text of the ranks, of which the last lines are shown.
    text = lab.output(page, 3).filter(has_text="] epoch 1").last
    above, below = explored.bounding_box(), text.bounding_box()
    assert above is not None
    assert below is not None
    assert above["y"] < below["y"]
    assert below["height"] <= 140
    # JupyterLab styles tables in an output's HTML: columns of equal width 0 lay on top of each other.
    heads = explored.locator(".nbl-table th:visible")
    assert min(heads.evaluate_all("cells => cells.map((cell) => cell.getBoundingClientRect().width)")) > 20
    explored.get_by_role("tab", name="Logs").click()
    explored.get_by_label("Search the log").fill("epoch 1")
    explored.locator(".nbl-count").get_by_text("2 of 4 lines").wait_for()
    drawing = lab.output(page, 3).locator("[data-nbl-cover] img")
    assert not drawing.is_visible()
    lab.run(page, 4)
    again = lab.output(page, 4).locator(".nbl-monitor")
    again.get_by_role("tab", name="Logs").click()
    again.get_by_text("epoch 1").first.wait_for()
    kept = lab.output(page, 4).locator("[data-nbl-kept] img")
    kept.wait_for(state="attached")
    assert not kept.is_visible()
    return drawing, kept


def test_monitor_is_operated_and_reloaded_while_its_cell_is_busy_and_explored_after_it(lab):
    page = lab.open("monitors.ipynb", height=1600)
    lab.run(page, 0)
    old = watch_a_busy_cell(lab, page)
    drawing, kept = explore_a_finished_run(lab, page)
    lab.start(page, 5)
    wait_for_state(page, "running")
    saved = lab.save(page, "monitors.ipynb")
    kinds = [kind for output in saved.cells[3].outputs for kind in output.get("data", {})]
    assert "text/html" in kinds
    assert "application/vnd.jupyter.widget-view+json" not in kinds
    page.evaluate("() => { jupyterapp.commands.execute('kernelmenu:restart'); }")
    page.locator(".jp-Dialog-button.jp-mod-accept").click()
    wait_for_state(page, "lost")
    assert monitor_of(page).locator(".nbl-button[data-action]:enabled").count() == 0
    lab.show(page, "monitors.ipynb")
    for one in (old, drawing, kept):
        one.wait_for()
    assert page.locator(".nbl-monitor").count() == 0
    for at in (1, 4):
        lab.output(page, at).get_by_text("model not found").wait_for(state="attached")
        assert not lab.output(page, at).get_by_text("model not found").is_visible()
    assert not lab.output(page, 3).get_by_text("model not found").count()


def look_at_errors_in_both_themes(page: Page, panel: Locator) -> None:
    launch = panel.get_by_role("button", name="Launch", exact=True)
    processes = panel.get_by_label("Processes", exact=True)
    for typed, message in {"abc": "Enter a whole number, 1 or more.", "1e3": "Enter 64 or less"}.items():
        processes.fill("")
        processes.press_sequentially(typed)
        alert = panel.locator(".nbp-field", has=page.get_by_label("Processes", exact=True)).get_by_role("alert")
        alert.get_by_text(message).wait_for()
        panel.locator("button:disabled", has_text="Launch").wait_for()
        assert launch.get_attribute("title") == "Fix Processes to enable Launch."
        page.wait_for_function(DESCRIBED, arg=[processes.element_handle(), "true", message])
        page.wait_for_function(DESCRIBED, arg=[launch.element_handle(), None, "Fix Processes to enable Launch."])
    looks = [page.evaluate(LOOK)]
    set_theme(page, "JupyterLab Dark")
    looks.append(page.evaluate(LOOK))
    picture(page, panel, "panel-dark.png")
    for look in looks:
        assert look["poor"] == []
        assert look["texts"] > 30
        assert look["outside"] == [], look
        assert look["width"] < 600
    set_theme(page, "JupyterLab Light")

    processes.fill("")


def launch_by_keys(page: Page, panel: Locator) -> None:
    reached: list[str] = []
    while not reached or "Launch" not in reached[-1]:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(NAME))
        assert len(reached) < 60, reached
        if "Advanced" in reached[-1]:
            page.keyboard.press("Enter")
            panel.get_by_label("Seed", exact=True).wait_for()
            panel.get_by_role("button", name="Advanced", expanded=True).wait_for()
            assert panel.get_by_label("Seed", exact=True).get_attribute("aria-invalid") == "false"
        if reached[-1] == "bf16":
            page.keyboard.press("Space")
            panel.get_by_role("button", name="bf16", pressed=True).wait_for()
            segments = panel.get_by_role("group", name="Mixed precision")
            segments.get_by_role("button", name="no", pressed=False).wait_for()
            panel.locator("pre", has_text='mixed_precision="bf16"').wait_for()
        if reached[-1] == "Shard models over":
            page.keyboard.type("2")
            panel.get_by_text("1/2 of parameters, gradients and optimizer state on each process").wait_for()
            panel.locator("pre", has_text="shard=2").wait_for()
            picture(page, panel, "panel-sharded.png")
    assert "Shard models over" in reached
    for name in ("Micro-batch size", "Accumulation steps", "lr", "epochs", "CPU", "Seed", "Backend", "Copy", "Launch"):
        assert any(name in address for address in reached), (name, reached)
    page.keyboard.press("Enter")
    wait_for_state(page, "done")


def open_copies(lab: Lab, page: Page, panel: Locator) -> None:
    """See in other notebooks the panel's picture, with that of the run below it, and run one of them."""
    if panel.get_by_role("button", name="Edit", exact=True).is_visible():
        panel.get_by_role("button", name="Edit", exact=True).click()
    panel.get_by_label("lr", exact=True).fill("0.625")
    panel.locator("pre", has_text='"lr": 0.625').wait_for()
    lab.cell(page, 0).locator(".cm-content").first.click()  # JupyterLab saves nothing from a widget's field.
    saved = lab.save(page, "panels.ipynb")
    lab.copy(saved, "trusted.ipynb")
    saved.cells[0].source = FAIL  # From somebody else: JupyterLab does not trust it.
    saved.cells[0].execution_count = None  # A quick run would end at the number that it began with, and count as lost.
    lab.copy(saved, "untrusted.ipynb")
    other = lab.open("trusted.ipynb", height=1600)
    for name in ("trusted.ipynb", "untrusted.ipynb"):
        if name == "untrusted.ipynb":
            lab.show_instead(other, name)
        other.get_by_text("Last picture of the panel.").wait_for()
        if name == "trusted.ipynb":
            other.get_by_text("model not found").wait_for(state="attached")
        shown = lab.cell(other, 1).locator(".jp-Cell-outputWrapper").inner_text()
        assert '"lr": 0.625' in shown
        assert "train on 2 ranks: done" in shown
        assert "not found" not in shown
        assert "ConfigPanel(train)" not in shown
        assert other.locator(".nbp-panel").count() == 0  # Nothing that could be clicked, until the cell runs.
        picture(other, lab.cell(other, 1), f"kept-{name}.png")
        if name == "untrusted.ipynb":
            lab.run(other, 0)
            lab.run(other, 1)
            other.locator(".nbp-panel").get_by_role("button", name="Launch", exact=True).click()
            wait_for_state(other, "failed")
            assert other.get_by_text("Last picture of the panel.").is_hidden()
            # In[2] if a lost key press had the cell run twice.
            other.locator(".nbp-panel").get_by_text(re.compile(r"In\[[12]\]")).first.wait_for()
            assert "ValueError: rank one <b>gave up</b>" in other.locator(".nbp-panel").inner_text()
    other.close()
    assert panel.get_by_text("train: done in").is_visible()


def run_the_cell_of_a_live_panel_again(lab: Lab, page: Page, panel: Locator) -> None:
    launch = panel.get_by_role("button", name="Launch", exact=True)
    for label, value in {"epochs": "1000000", "pause": "0.01"}.items():
        panel.get_by_label(label, exact=True).fill(value)
    launch.click()
    wait_for_state(page, "running")
    lab.run(page, 0)
    lab.run(page, 1)
    wait_for_state(page, "running")
    panel.get_by_text("As you left the panel: ").get_by_text("epochs 1000000, pause 0.01").wait_for()
    picture(page, panel, "panel-again.png")
    assert launch.is_disabled()
    panel.get_by_role("button", name="Stop", exact=True).click()
    wait_for_state(page, "stopped")
    assert panel.count() == 1


def test_panel_is_operated_by_keys_copied_run_again_and_replaced_by_its_picture(lab):
    page = lab.open("panels.ipynb", width=600, height=1200)
    lab.run(page, 0)
    lab.run(page, 1)
    panel, kept = page.locator(".nbp-panel"), page.get_by_text("Last picture of the panel.")
    look_at_errors_in_both_themes(page, panel)
    launch_by_keys(page, panel)
    page.set_viewport_size({"width": 1200, "height": 2600})
    open_copies(lab, page, panel)
    run_the_cell_of_a_live_panel_again(lab, page, panel)
    assert kept.is_hidden()
    live = [page.locator(".nbr-runs"), page.locator("[aria-label='Runs side by side']")]
    pictures = [lab.cell(page, at).locator("[class^='nbp-kept-']") for at in (2, 3)]
    for at in (2, 3):
        lab.run(page, at)
        live[at - 2].wait_for()
    assert not any(one.is_visible() for one in pictures)
    lab.run(page, 4)
    wait_for_state(page, "running")
    lab.start(page, 5)
    page.get_by_role("button", name="Ok", exact=True).click()  # JupyterLab says that the kernel has died.
    page.get_by_text("The kernel restarted or ended. The run has ended too.").wait_for()
    assert page.get_by_role("button", name="Stop after this step").last.is_disabled()
    for one in (kept, *pictures):
        one.wait_for()
    assert not any(one.is_visible() for one in (panel, *live))


def test_widgets_tabs_and_debugger_of_cells_on_ranks_work_in_the_page(lab):
    page = lab.open("ranks.ipynb", height=1400)
    lab.run(page, 0)
    lab.run(page, 1)
    slider = lab.cell(page, 1).locator(".noUi-handle")
    slider.focus()
    page.keyboard.press("ArrowRight")
    lab.cell(page, 1).locator(".widget-readout").get_by_text("4").wait_for()

    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    page.reload()  # The page asks the kernel for the widgets that its notebook shows.
    slider.focus()
    page.keyboard.press("ArrowRight")
    lab.cell(page, 1).locator(".widget-readout").get_by_text("5").wait_for()

    lab.start(page, 2)
    lab.cell(page, 2).locator(".widget-hprogress, .progress").first.wait_for()
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    lab.cell(page, 1).locator(".widget-readout").get_by_text("11").wait_for()
    picture(page, page.locator("body"), "rank-cells-widgets.png")
    lab.cell(page, 1).get_by_role("button", name="stop").click()
    assert lab.wait(page, 2)
    assert "saw 5 11" in "".join(lab.output(page, 2).all_inner_texts())

    lab.run(page, 3)
    table = lab.cell(page, 3).get_by_text("table 1")
    assert not table.is_visible()
    lab.cell(page, 3).locator("label").get_by_text("rank 1").click()
    table.wait_for()
    picture(page, page.locator("body"), "rank-cells-tabs.png")

    lab.run(page, 4)
    lab.start(page, 5)
    for command in ("p factor", "q"):
        # The box of the answer before stays for a moment, with its text.
        page.wait_for_function("() => [...document.querySelectorAll('.jp-Stdin-input')].at(-1)?.value === ''")
        box = page.locator(".jp-Stdin-input").last
        box.fill(command)
        picture(page, page.locator("body"), f"rank-cells-debugger-{command[0]}.png")
        box.press("Enter")
        lab.cell(page, 5).get_by_text(f"(rank 0 pdb) {command}").wait_for()
    assert lab.wait(page, 5)
    assert "pdb)" in "".join(lab.output(page, 5).all_inner_texts())
    lab.run(page, 6)
