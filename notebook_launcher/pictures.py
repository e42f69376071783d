"""Pictures that a rank reports: images, histograms and rates to come, as PNG or SVG of bounded size.

Arrays, tensors, figures and images of Pillow are recognised by their methods, so that a rank imports no library that
its function does not use.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import zlib
from typing import Any

from notebook_launcher.colours import INK, SERIES
from notebook_launcher.wording import shape_of

PNG, SVG = "image/png", "image/svg+xml"
MAX_SIDE = 1024
"""Pixels; a larger image is thinned to every second, third ... row and column."""
MAX_BYTES = 1_000_000
"""Bytes of a PNG; a larger one is thinned further."""
COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""PNG's numbers for grey, RGB and RGBA, by channels."""
BARS = (320, 150)
"""Width and height of a histogram, and of a curve of rates."""


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in bins of equal width; `histogram(tensor)` makes it."""

    low: float
    high: float
    counts: tuple[int, ...]
    not_finite: int = 0
    """Values that are NaN or infinite; no bin has them."""

    def __float__(self) -> float:
        raise TypeError("a histogram is a picture, not a number")


class Rates(list[float]):
    """The learning rates of coming updates; a cell shows them as a curve."""

    first_update: int = 1
    """The number of the update that has the first rate."""

    def _repr_svg_(self) -> str:
        return _curve(self)


def encode_picture(value: Any) -> tuple[str, bytes] | None:
    """Return the type and the bytes of a picture; None if the value is none.

    Pictures are a `Histogram`; `Rates`; a figure of matplotlib; an image of Pillow; an array or tensor of shape
    (H, W, C), or (C, H, W) for a tensor, with 1, 3 or 4 channels; and one of shape (H, W) with bytes. Floats are from
    0 to 1.
    """
    if isinstance(value, Histogram):
        return SVG, _bars(value).encode()
    if isinstance(value, Rates):
        return SVG, _curve(value).encode()
    if callable(getattr(value, "savefig", None)):
        file = io.BytesIO()
        value.savefig(file, format="png")
        return PNG, file.getvalue()
    if callable(getattr(value, "getbands", None)):
        return PNG, _png_of_pillow(value)
    pixels = _pixels_of(value)
    return None if pixels is None else (PNG, _png_of_array(pixels))


def _png_of_pillow(image: Any) -> bytes:
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGBA")
    side = MAX_SIDE
    while True:
        copy, file = image.copy(), io.BytesIO()
        copy.thumbnail((side, side))
        copy.save(file, format="PNG")
        if file.tell() <= MAX_BYTES:
            return file.getvalue()
        side //= 2


def _pixels_of(value: Any) -> Any:
    """Return an array of bytes of shape (H, W, C), by the methods of NumPy's arrays; None for all other values."""
    shape = shape_of(value)
    if shape is None or not callable(getattr(value, "__array__", None)) or len(shape) not in (2, 3) or 0 in shape:
        return None
    array = value
    if callable(getattr(value, "detach", None)):
        array = value.detach().cpu()
        array = (array.float() if array.dtype.is_floating_point else array).numpy()
        if array.ndim == 3 and shape[0] in COLOUR_TYPES and shape[2] not in COLOUR_TYPES:
            array = array.transpose(1, 2, 0)
    if array.ndim == 2 and array.dtype.kind in "ub":
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in COLOUR_TYPES or array.dtype.kind not in "fiub":
        return None
    if array.dtype.kind == "f":
        array = array * 255.0 + 0.5  # A copy.
        array[array != array] = 0  # noqa: PLR0124 - a NaN, which has no byte, is black
    elif array.dtype.kind == "b":
        array = array * 255
    return array.clip(0, 255).astype("uint8")


def _png_of_array(pixels: Any) -> bytes:
    stride = max(1, math.ceil(max(pixels.shape[:2]) / MAX_SIDE))
    while True:
        png = _png(pixels[::stride, ::stride])
        if len(png) <= MAX_BYTES:
            return png
        stride *= 2


def _png(pixels: Any) -> bytes:
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels)
    data = b"".join(b"\0" + row.tobytes() for row in rows)  # Each row begins with its filter, here none.
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(data, 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def _bars(histogram: Histogram) -> str:
    width, height = BARS
    base, top = height - 18, max(histogram.counts, default=0) or 1
    step = width / max(1, len(histogram.counts))
    bars = "".join(
        f"M{at * step:.1f} {base}v{-(base - 4) * count / top:.1f}h{step * 0.9:.1f}V{base}z"
        for at, count in enumerate(histogram.counts)
        if count
    )
    left_out = f", {histogram.not_finite:,} not finite" if histogram.not_finite else ""
    words = f"{sum(histogram.counts):,} values{left_out}"
    drawn = f'<path d="{bars}" fill="{SERIES[0]}"/>'
    return _framed(drawn, f"{histogram.low:.4g}", words, f"{histogram.high:.4g}")


def _curve(rates: Rates) -> str:
    width, height = BARS
    base, last = height - 18, max(1, len(rates) - 1)
    top = max((rate for rate in rates if math.isfinite(rate)), default=0.0) or 1.0
    thinned = list(enumerate(rates))[:: math.ceil(len(rates) / width) or 1]
    points = " ".join(
        f"{at * width / last:.1f},{base - (base - 4) * rate / top:.1f}" for at, rate in thinned if math.isfinite(rate)
    )
    drawn = f'<polyline points="{points}" fill="none" stroke="{SERIES[0]}" stroke-width="1.5"/>'
    first = rates.first_update
    return _framed(drawn, f"update {first:,}", f"rates up to {top:.4g}", f"{first + len(rates) - 1:,}")


def _framed(drawn: str, left: str, middle: str, right: str) -> str:
    """Return an SVG above a line with three texts, whose colours can be read on white and on black."""
    width, height = BARS
    base = height - 18
    labels = (0, "start", left), (width / 2, "middle", middle), (width, "end", right)
    texts = "".join(f'<text x="{x}" y="{height - 4}" text-anchor="{where}">{word}</text>' for x, where, word in labels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">{drawn}'
        f'<path d="M0 {base}.5H{width}" stroke="{INK}"/>{texts}</svg>'
    )
