"""Configuration of the documentation: `make docs` builds it without a network, and every warning is an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

import notebook_launcher  # noqa: E402 - the checkout's own

project = "notebook-launcher"
author = "the authors of notebook-launcher"
copyright = "the authors of notebook-launcher"
release = version = notebook_launcher.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
    "mathml",
    "message_list",
    "public_names",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints", "notebooks/*_check.ipynb"]
nitpicky = True

# `docs/notebooks` is a link to the notebooks, which are committed and shown without outputs.
# `make docs EXECUTE=force` runs them first, in real kernels, and shows their outputs.
nb_execution_mode = os.environ.get("EXECUTE") or "off"
nb_execution_in_temp = True  # their files are removed with the folder
nb_execution_timeout = 300
nb_execution_raise_on_error = True
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(DOCS.parent), os.environ.get("PYTHONPATH")]))

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = False
default_role = "public"  # in docstrings: a link if the reference has the name, otherwise code
suppress_warnings = ["ref.python"]  # a short name in an annotation that compat has too means the first one

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"notebook-launcher {version}"
html_static_path = ["_static"]
html_css_files = ["formulas.css"]
html_extra_path = ["llms.txt"]  # for agents, at the root (llmstxt.org)
html_copy_source = False
html_show_sphinx = False
