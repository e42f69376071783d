"""The promises for launches, with the measured figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.big import extra_time
from support.first import PAUSES, first_launches, slowest
from support.libraries import KINDS
from support.lives import OURS
from support.report import megabytes, table

if TYPE_CHECKING:
    from support.measurements import Measurements


def promise_table(found: Measurements) -> str:
    ours = found.median("warm", "ours", 2)
    copy, clone = found.median("copy", "new"), found.median("copy", "tensor")
    rows = [
        promise("2 ranks, warm: <= 45 ms", ours, 0.045, None),
        promise("each further rank: <= 15 ms", further_rank(found, "ours"), 0.015, None),
        *(promise(f"2 ranks, warm: <= 3 x a bare fork-and-exit ({what})", ours, 3, found.median("warm", name, 2))
          for name, what in (("bare", "torch imported"), ("bare-compiler", "its compiler too"),
                             ("bare-huge", "and huge pages"))),
        promise("2 ranks, warm: <= 0.4 x accelerate", ours, 0.4, found.median("warm", "accelerate", 2)),
        *library_promises(found),
        first_promise(found),
        promise("Session.run, calls in a row: <= 1.2 ms", found.median("row", "session", 2), 0.0012, None),
        promise("Session.run, after the others' turns: <= 1.2 ms", found.median("warm", "session", 2), 0.0012, None),
        promise("1 GB captured (array), 4 ranks: <= 2 x NumPy's copy", extra_time(found, "ours", "array"), 2, copy),
        promise("1 GB captured (tensor), 4 ranks: <= 2 x torch's copy", extra_time(found, "ours", "tensor"), 2, clone),
        memory_promise(found),
        promise("1 GB returned (tensors): <= 2 x torch's copy", found.median("return", "ours"), 2, clone),
        promise("1 GB returned (tensors): <= 2 x NumPy's copy", found.median("return", "ours"), 2, copy),
        peak_promise(found),
        *(promise(f"a rank dies ({text}): < 2 s", found.median(how, "ours"), 2.0, None)
          for how, text in (("die", "SIGKILL"), ("fail", "ValueError"))),
        promise("the kernel is killed: nothing left after 2 s", found.median("killed", "ours"), 2.0, None),
        *(promise(f"{statement}: <= 40 ms", found.median("import", statement), 0.04, None) for statement in OURS),
    ]  # fmt: skip
    used, tensor = found.cell("copy", "used"), found.cell("copy", "tensor")
    note = (
        f"Medians. A memory copy is the copy of an array into new memory; a copy into used memory took {used} ms, and "
        f"the copy of a tensor, in small pages, {tensor} ms."
    )
    return f"## Promises\n\n{note}\n\n" + table(["promise", "measured", "held"], rows)


def library_promises(found: Measurements) -> list[list[str]]:
    """Return the rows about functions that use libraries."""
    rows = []
    for kind in KINDS:
        ours, theirs = (found.median(kind, name, "warm") for name in ("ours", "accelerate"))
        loaded, trivial = found.median(kind, "ours", "import"), found.median("cold", "ours", 2)
        limit = None if loaded is None or trivial is None else loaded + trivial
        private = found.median(kind, "ours", "private")
        rows += [
            promise(f"{kind}, warm: <= 0.5 x accelerate", ours, 0.5, theirs),
            promise(f"{kind}, first launch: <= 1 x its import + a trivial launch", found.median(kind, "ours", "first"),
                    1, limit),
            [f"{kind}: <= 40 MB private a rank", f"{megabytes(private)} MB", "yes" if private <= 40e6 else "**no**"]
            if private else [f"{kind}: <= 40 MB private a rank", "not measured", "-"],
        ]  # fmt: skip
    return rows


def further_rank(found: Measurements, name: str) -> float | None:
    """Return the seconds that each rank beyond the second adds."""
    two, eight = found.median("warm", name, 2), found.median("warm", name, 8)
    return None if two is None or eight is None else (eight - two) / 6


def promise(text: str, value: float | None, limit: float, base: float | None) -> list[str]:
    """Return a row; `limit` is in multiples of `base`, or in seconds if `base` is None."""
    if value is None or (base is None and " x " in text):
        return [text, "not measured", "-"]
    measured = f"{1e3 * value:.1f} ms"
    if base is not None:
        measured += f" = {value / base:.2f} x {1e3 * base:.1f} ms"
    return [text, measured, "yes" if value <= limit * (base or 1.0) else "**no**"]


def first_promise(found: Measurements) -> list[str]:
    text = "ten launches from a cold kernel, 0.05 to 3 s apart: none after the first > 2 x the median"
    ratios = [slowest(launches) for pause in PAUSES if (launches := first_launches(found, pause))]
    if not ratios:
        return [text, "not measured", "-"]
    return [text, f"{max(ratios):.2f} x", "yes" if max(ratios) <= 2 else "**no**"]


def memory_promise(found: Measurements) -> list[str]:
    text = "1 GB captured, 4 ranks: one copy in memory"
    sizes = [
        (found.median("memory", "ours", kind, "pss") or 0) - (found.median("memory", "ours", "none", "pss") or 0)
        for kind in ("array", "tensor")
        if found.median("memory", "ours", kind, "pss") is not None
    ]
    if not sizes:
        return [text, "not measured", "-"]
    return [text, " and ".join(megabytes(size) for size in sizes) + " MB", "yes" if max(sizes) < 1.1e9 else "**no**"]


def peak_promise(found: Measurements) -> list[str]:
    text = "1 GB returned: no second full copy in the kernel"
    peak = found.median("peak", "ours")
    if peak is None:
        return [text, "not measured", "-"]
    return [text, f"peak rises by {megabytes(peak)} MB", "yes" if peak < 1.2e9 else "**no**"]
