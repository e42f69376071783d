"""Completion and inspection inside `%%ranks` cells, by the names of the ranks, not of the notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cell_matcher", "inspecting"]

IDENTIFIER = "notebook_launcher.ranks"
MAGIC = "%%ranks"


def cell_matcher(session: Callable[[str], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a matcher for IPython's completer: the ranks' completions inside the body of a `%%ranks` cell.

    `session` returns the session of a cell with this text behind `%%ranks`, or None. Raises ImportError before
    IPython 8.6, which has no such matchers.
    """
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier=IDENTIFIER, priority=100)  # type: ignore[untyped-decorator]
    def matcher(context: Any) -> dict[str, Any]:
        lines = context.full_text.split("\n")
        if not lines[0].startswith(MAGIC) or context.cursor_line == 0:
            return {"completions": []}
        active = session(lines[0].removeprefix(MAGIC))
        if active is None:
            return {"completions": []}
        body = "\n".join(lines[1:])
        offset = sum(len(line) + 1 for line in lines[1 : context.cursor_line]) + context.cursor_position
        found = active.complete(body, offset)
        if not found:
            # Without an answer the word itself is offered, because IPython would otherwise offer the notebook's names.
            return {"completions": [SimpleCompletion(text=context.token, type="rank")], "suppress": True}
        start = found[0].start
        return {
            "completions": [
                SimpleCompletion(text=completion.text, type=completion.kind)
                for completion in found
                if completion.start == start
            ],
            "matched_fragment": body[start:offset],
            "suppress": True,
        }

    return matcher  # type: ignore[no-any-return]


def inspecting(original: Callable[..., Any], session: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a `do_inspect` for ipykernel that answers inside `%%ranks` cells by the objects of the ranks."""

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **options: Any) -> Any:
        line = code.partition("\n")[0]
        active = session(line.removeprefix(MAGIC)) if line.startswith(MAGIC) else None
        if active is None:
            return original(code, cursor_pos, detail_level, *args, **options)
        from IPython.utils.tokenutil import token_at_cursor

        data = active.inspect_name(token_at_cursor(code, cursor_pos), detail_level)
        return {"status": "ok", "data": dict(data), "metadata": {}, "found": bool(data)}

    return do_inspect
