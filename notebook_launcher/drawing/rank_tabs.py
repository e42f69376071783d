"""Rich output of several ranks as HTML: a tab for each rank, and one tab for ranks with equal output.

The tabs are radio buttons and style rules, without a script. Where a front end removes both, as for a notebook that is
not trusted, the parts stand below each other, each with its heading.
"""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any

from notebook_launcher.colours import SERIES
from notebook_launcher.wording.counts import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["rank_tabs"]

IMAGES = ("image/png", "image/jpeg", "image/gif")
STYLE = (
    "{key}>input,{key}>section,{key}>section>h4{{display:none}}"
    "{key}>label{{display:inline-block;padding:2px 10px;cursor:pointer;border-bottom:2px solid transparent;opacity:.7}}"
    "{key}>input:checked+label{{border-color:{colour};opacity:1;font-weight:600}}"
    "{key}>input:focus-visible+label{{outline:2px solid {colour}}}"
)


def rank_tabs(panels: Mapping[int, Sequence[Mapping[str, Any]]], key: str) -> str:
    """Return the bundles of each rank in tabs; `key` is a word that no other output on the page uses."""
    contents: dict[str, list[int]] = {}
    for rank, bundles in sorted(panels.items()):
        contents.setdefault("".join(map(bundle_as_html, bundles)), []).append(rank)
    style, tabs, sections = STYLE.format(key=f".{key}", colour=SERIES[0]), "", ""
    for number, (content, ranks) in enumerate(contents.items()):
        name = f"{key}-{number}"
        title = rank_list(ranks)
        checked = " checked" if number == 0 else ""
        style += f"#{name}:checked~#{name}-of{{display:block}}"
        tabs += f'<input type="radio" name="{key}" id="{name}"{checked}><label for="{name}">{title}</label>'
        sections += f'<section id="{name}-of" style="padding:6px 0"><h4>{title}</h4>{content}</section>'
    return f'<div class="{key}"><style>{style}</style>{tabs}{sections}</div>'


def bundle_as_html(bundle: Mapping[str, Any]) -> str:
    """Return the richest form of a bundle that HTML can hold."""
    if "text/html" in bundle:
        return f"<div>{bundle['text/html']}</div>"
    if "image/svg+xml" in bundle:
        return f"<div>{bundle['image/svg+xml']}</div>"
    for kind in IMAGES:
        if kind in bundle:
            data = bundle[kind]
            text = base64.b64encode(data).decode() if isinstance(data, bytes) else str(data).replace("\n", "")
            words = html.escape(str(bundle.get("text/plain", "")), quote=True)
            return f'<div><img alt="{words}" style="max-width:100%" src="data:{kind};base64,{text}"></div>'
    return f'<pre style="margin:0;white-space:pre-wrap">{html.escape(str(bundle.get("text/plain", "")))}</pre>'
