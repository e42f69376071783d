"""The documentation: it builds without a warning, describes every public name, and its code runs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.history.run_folders import VARIABLE
from tests.support import pages
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCS = ROOT / "docs"
HOW_TOS = sorted(page for page in (DOCS / "how-to").glob("*.md") if page.stem != "index")
PACKAGES = ("notebook_launcher", "notebook_launcher.training", "notebook_launcher.compat", "notebook_launcher.widgets")
# The build takes 15 s of a core; more than a minute on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
EXAMPLE = re.compile(r"(?<=[^:]\n\n)((?:    .*\n|\n)+)", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    target = tmp_path_factory.mktemp("docs")
    # Furo copies the tree of all pages into each page, by which the build takes a third longer.
    options = ["-W", "--keep-going", "-q", "-d", str(target / "doctrees"), "-D", "html_theme=basic"]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return target


def public_names() -> Iterator[tuple[str, Any]]:
    """Yield every public name with its object."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = dir(module) if package == PACKAGES[0] else module.__all__
        for name in names:
            if not name.startswith("__"):
                yield f"{package}.{name}", getattr(module, name)


def test_reference_describes_every_public_name(site):
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(packed).decode().splitlines()
    described = {line.split(" ", 1)[0] for line in lines if " py:" in line}
    objects = dict(public_names())
    reachable = {id(value) for name, value in objects.items() if name in described}
    assert [name for name, value in objects.items() if id(value) not in reachable] == []


def test_pages_load_nothing_from_the_network(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//", text), page


def test_formulas_are_typeset_without_scripts(site):
    page = (site / "explanation/exact-accumulation.html").read_text(encoding="utf-8")
    assert page.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') > 5
    assert "\\frac" not in page


def test_message_page_lists_every_message(site):
    from notebook_launcher.messaging import messages

    page = (site / "explanation/messages.html").read_text(encoding="utf-8")
    sent = {
        name for name in vars(messages) if " -> " in messages.__doc__ and re.search(rf"\b{name}\b", messages.__doc__)
    }
    assert len(sent) > 15
    assert [name for name in sorted(sent) if f">{name}<" not in page] == []


def examples() -> Iterator[tuple[str, str]]:
    """Yield the indented blocks of the public names' docstrings."""
    for name, value in public_names():
        docs = {name: inspect.getdoc(value)}
        if inspect.isclass(value):
            docs.update({f"{name}.{key}": inspect.getdoc(member) for key, member in vars(value).items()})
        for where, doc in docs.items():
            text = re.split(r"\n(?:Args|Returns|Raises|Yields):\n", f"{doc or ''}\n")[0]
            yield from ((where, textwrap.dedent(code)) for code in EXAMPLE.findall(text) if code.strip())


# How-to guides run their own code; the examples of docstrings use these names.
GIVEN = """
import contextlib, sys, torch
import notebook_launcher
from notebook_launcher import *
from notebook_launcher import Accelerator
from notebook_launcher.training import LocalSGD
from notebook_launcher.widgets import *
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader([(torch.ones(2), torch.ones(1))] * 4, batch_size=1)
loss_function = torch.nn.functional.mse_loss
accelerator = Accelerator()
path = "data"
def load(path): globals()["data"] = path
def train(epochs=1): report(step=0, loss=1 / epochs)
run = run_a = run_b = launch(train, 2, output="none")
run.wait()
"""


@pytest.fixture(scope="module")
def reader(module_kernel):
    return module_kernel


@pytest.mark.parametrize("how_to", HOW_TOS, ids=lambda path: path.stem)
def test_how_to_code_prints_what_the_page_shows(how_to, reader, tmp_path):
    found = list(pages.blocks(how_to.read_text(encoding="utf-8")))
    assert found
    needed = {block.value for block in found if block.mark == "needs"}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    with contextlib.ExitStack() as stack:
        # Imports of other libraries would slow down the pages that come after; an export names what cells registered.
        has_own = needed or "copyreg.pickle" in how_to.read_text(encoding="utf-8")
        reader = stack.enter_context(pages.reader(tmp_path)) if has_own else reader
        # A page may switch the recording of runs off.
        start = f"import os; os.chdir({str(tmp_path)!r}); os.environ[{VARIABLE!r}] = {str(tmp_path / 'kept')!r}; del os"
        assert reader.execute(f"%reset -f\n{start}").error is None
        for block in found:
            if block.mark != "needs" or block.value not in missing:
                pages.run(block, reader)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; the other code of the page ran")


def test_examples_in_docstrings_run(reader, tmp_path):
    found = {code: where for where, code in examples()}
    assert len(found) >= 4
    assert reader.execute(f"%reset -f\n%cd -q {tmp_path}\n{GIVEN}").error is None
    for code, where in found.items():
        if code.lstrip().startswith("{"):
            json.loads(code)
            continue
        outcome = reader.execute(code)
        assert outcome.error is None, f"{where}\n{outcome.traceback}"
