"""Names of the public packages: written once, typed for checkers, imported when they are first used."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import notebook_launcher
from notebook_launcher import facade, training, widgets

if TYPE_CHECKING:  # mypy reads these lines as those of a user's program
    from typing import assert_type

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.training.accelerator import Accelerator
    from notebook_launcher.training.accumulation.local_sgd import LocalSGD
    from notebook_launcher.widgets.panel.panel import ConfigPanel

    assert_type(notebook_launcher.LaunchConfig(), LaunchConfig)
    assert_type(notebook_launcher.Accelerator(), Accelerator)
    assert_type(notebook_launcher.PartialState(), notebook_launcher.ProcessState)
    assert_type(training.LocalSGD, type[LocalSGD])
    assert_type(widgets.ConfigPanel, type[ConfigPanel])

PACKAGE = '''
"""A package."""
from typing import TYPE_CHECKING
from notebook_launcher.facade import LazyNames
if TYPE_CHECKING:
    from made_up.inner import Thing as Thing
    Alias = Thing
NAMES = LazyNames(__name__)
'''


def test_public_name_is_imported_at_first_use(tmp_path):
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "inner.py").write_text("class Thing: ...")
    probe = """
import sys, made_up
assert made_up.NAMES.homes["Thing"] == made_up.NAMES.homes["Alias"] == ("made_up.inner", "Thing")
assert "made_up.inner" not in sys.modules
assert made_up.NAMES.find("Thing") is made_up.NAMES.find("Alias") is sys.modules["made_up.inner"].Thing
"""
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=tmp_path)


@pytest.mark.parametrize("package", [notebook_launcher, training, widgets])
def test_unknown_name_raises_attribute_error_with_package(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nowhere'"):
        _ = package.nowhere


@pytest.mark.parametrize("package", [notebook_launcher, training, widgets])
def test_every_name_of_a_facade_has_the_object_of_its_home(package):
    homes = facade.LazyNames(package.__name__).homes
    assert homes
    assert set(package.__all__) <= homes.keys() & set(dir(package))
    for name, home in homes.items():
        assert getattr(package, name) is getattr(sys.modules[home.module], home.name)
