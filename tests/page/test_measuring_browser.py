"""Time in the monitor: sampled stacks and profiles, in a real browser with a fake model."""

from __future__ import annotations

from typing import Any

from notebook_launcher.drawing.reported import flame_svg
from notebook_launcher.history.summaries import Flame, FlameFrame
from tests.support.monitor_page import EVIL, Tab, reset, run

PART = "Where the time goes"

FLAMES = [
    Flame(
        rank=rank,
        num_samples=10,
        frames=(
            FlameFrame(
                name="train, line 3",
                place="Cell In[1], line 3",
                count=10,
                children=(FlameFrame(name="all_reduce", place="", count=4 + rank, is_wait=True),),
            ),
        ),
    )
    for rank in range(2)
]
TABLE = {
    "head": "rank 0: 3 updates from update 12 on",
    "columns": ["operator", "calls", "share"],
    "rows": [["aten::mm", "12", "61 %"], [EVIL, "1", "2 %"]],
    "trace": "/runs/one/trace_rank0_update12.json.gz",
    "trace_data": "dHJhY2U=",
    "notes": ["trace: /runs/one/trace_rank0_update12.json.gz"],
}


def finding(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a message with an item FINDING."""
    return {"type": "update", "findings": [{"kind": kind, "drawing": "", "tables": [], "problem": "", **changes}]}


def test_sample_shows_the_flame_of_each_rank(tab: Tab) -> None:
    tab.deliver(reset())
    button = tab.page.get_by_role("button", name="Sample")
    for text in ("0", "61", "1.5", ""):
        tab.page.get_by_label("Sample: seconds").fill(text)
        button.click()
    assert tab.sent() == ["hello"]  # An amount out of range is not sent.
    tab.page.get_by_label("Sample: seconds").fill("2")
    button.click()
    assert tab.page.evaluate("model.sent.at(-1)") == {"type": "sample", "amount": 2}
    assert button.is_disabled()
    assert tab.page.get_by_text("Sample: 2 seconds …").is_visible()
    tab.deliver(finding("sample", drawing=flame_svg(FLAMES)))
    assert button.is_enabled()
    texts = tab.find(".nbl-finding svg text").all_text_contents()
    assert "rank 1: 10 samples, 50 % waits" in texts
    titles = tab.find(".nbl-finding svg title").all_text_contents()
    assert "train, line 3, Cell In[1], line 3: 10 samples" in titles


def test_profile_shows_its_table_and_the_trace(tab: Tab) -> None:
    tab.deliver(reset())
    tab.page.get_by_label("Profile: updates").fill("7")
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("model.sent.at(-1)") == {"type": "profile", "amount": 7}
    tab.deliver(finding("profile", tables=[TABLE]))
    assert tab.text(".nbl-finding caption") == TABLE["head"]
    assert tab.texts(".nbl-finding td") == ["aten::mm", "12", "61 %", EVIL, "1", "2 %"]
    assert tab.page.get_by_text("trace: /runs/one/trace_rank0_update12.json.gz").is_visible()
    assert tab.page.get_by_role("link", name="Perfetto").get_attribute("href") == "https://ui.perfetto.dev"
    with tab.page.expect_download() as trace:
        tab.page.get_by_role("link", name="Download the trace").click()
    assert trace.value.suggested_filename == "trace_rank0_update12.json.gz"
    assert trace.value.path().read_bytes() == b"trace"
    tab.deliver({"type": "update", "run": run(state="done", is_over=True)})
    assert tab.page.get_by_role("button", name="Profile").is_hidden()
    assert tab.find(".nbl-finding table").is_visible()


def test_reason_is_shown_where_nothing_was_found(tab: Tab) -> None:
    tab.deliver(reset())
    tab.page.get_by_role("button", name="Profile").click()
    tab.deliver(finding("profile", problem=f"torch.profiler is active {EVIL}"))
    assert tab.page.get_by_text(f"torch.profiler is active {EVIL}").is_visible()
    assert tab.page.get_by_role("button", name="Profile").is_enabled()
    reason = "Needs an Accelerator that has made an update"
    tab.deliver(reset(run=run(actions={**run()["actions"], "profile": False}, change_hint=reason)))
    assert tab.page.get_by_role("button", name="Profile").get_attribute("title") == reason


def test_drawing_brings_nothing_but_a_drawing(tab: Tab) -> None:
    tab.deliver(reset())
    svg = '<svg xmlns="http://www.w3.org/2000/svg" onload="window.hacked=1"><script>window.hacked=1</script>'
    tab.deliver(finding("sample", drawing=svg + '<image href="x"/><rect onclick="x()" width="3"/></svg>'))
    inner = tab.find(".nbl-finding svg").first.evaluate("svg => svg.innerHTML")
    assert inner.replace(' xmlns="http://www.w3.org/2000/svg"', "") == '<rect width="3"></rect>'
    assert tab.page.evaluate("window.hacked") is None
