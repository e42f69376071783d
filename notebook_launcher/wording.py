"""The wording of what people read: texts, numbers and values."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import errno
import functools
import itertools
import math
import numbers
import re
import reprlib
import types
import unicodedata
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

T = TypeVar("T")


# --------------------------------------------------------------------------------------------------------------------
# Text from anywhere, made safe for a page and short enough for its place.


MAX_TEXT = 50_000
"""Characters of one text that a page takes in; a traceback has about 2,000."""
MAX_SHOWN, MAX_ERROR = 2000, 3000
"""Characters of the text by which a value, and an error, shows itself: programs that read notebooks cut longer texts
somewhere, and their readers pay by length."""
WHOLE_RUN = "whole run"
"""Description of the loop that is all of a training, as `report(total_steps=)` and transformers' trainer tell it."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# What XML 1.0 cannot hold, the C1 controls, and the marks that turn the direction of the text around them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]",
)


def name_rank(rank: int, node: str = "", *, of: int | None = None) -> str:
    """Return `rank 3`, `rank 3 of 8` or `rank 3 of 8 (gpu2)`: with the number of ranks and its machine, if given."""
    total = "" if of is None else f" of {of}"
    return f"rank {rank}{total} ({node})" if node else f"rank {rank}{total}"


def no_such_rank(rank: object, num: int, whose: str = "run") -> str:
    """Return `there is no rank 7: this run has 2 ranks, 0 to 1`."""
    present = f"{num} ranks, 0 to {num - 1}" if num > 1 else "rank 0 alone"
    return f"there is no rank {rank!r}: this {whose} has {present}"


def first_few(names: Sequence[str], at_most: int = 3) -> str:
    """Return `a, b, c, ...`: the first names, and dots if there are more."""
    return ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")


def class_name(value: object) -> str:
    """Return the name of an object's class, as the user wrote it: torch makes `FSDPNet` of a model's class `Net`."""
    kind = type(value)
    if kind.__name__.startswith("FSDP") and kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[1]
    return kind.__name__


def type_of(value: object) -> str:
    """Return the type of a value with its article: `an int`, `a list`."""
    name = class_name(value)
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return the shape of a tensor, an array or a table; None for other values, and for one that has no shape yet."""
    try:
        shape = value.shape
    except Exception:  # torch's uninitialised parameters and nested tensors raise a RuntimeError
        return None
    return tuple(shape) if isinstance(shape, tuple) else None


def clean(text: object, limit: int = MAX_TEXT) -> str:
    """Return the text without colour codes; other control characters and lone surrogates become `\ufffd`."""
    raw = str(text)
    kept = _UNPRINTABLE.sub("\ufffd", _ANSI.sub("", raw[:limit].replace("\r\n", "\n")))
    return kept if len(raw) <= limit else f"{kept}\n... {len(raw) - limit:,} more characters"


def without_colours(text: str) -> str:
    """Return the text without the escape sequences of a terminal."""
    return _ANSI.sub("", text)


def bounded(text: str, whole: str, limit: int = MAX_SHOWN) -> str:
    """Return a text in at most `limit` characters: its beginning and end, and between them a line about the rest.

    Args:
        text: The text.
        whole: A clause that says where all of it is, such as `print(run.stacks()) shows all`.
        limit: Characters at most.
    """
    if len(text) <= limit:
        return text
    room = limit - len(whole) - 50  # for the line between
    start, end = text[: room * 2 // 3], text[-(room // 3) :]
    # At whole lines, unless a line is so long that too little would be left.
    if (cut := start.rfind("\n")) > room // 3:
        start = start[:cut]
    if 0 <= (cut := end.find("\n")) < room // 6:
        end = end[cut + 1 :]
    return f"{start}\n... {len(text) - len(start) - len(end):,} characters left out here: {whole} ...\n{end}"


def told(record: Any) -> str:
    """Return the repr of a record of many fields: those that say something, in a length that fits below a cell."""
    shown = ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record) if field.repr)
    words = ", ".join(f"{name}={value!r}" for name, value in shown if value not in (None, "", (), {}))
    return bounded(f"{type(record).__name__}({words})", "dataclasses.asdict() has all")


class Listed(tuple[T, ...]):
    """A tuple whose repr fits below a cell."""

    __slots__ = ()

    def __repr__(self) -> str:
        return bounded(super().__repr__(), "index it to see one")


def one_line(text: object, limit: int = 200) -> str:
    """Return the text in one line of at most `limit` characters."""
    line = " ".join(clean(text, 4 * limit).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def first_columns(text: str, width: int) -> str:
    """Return the beginning of a text that takes at most `width` columns of a terminal; some characters take two."""
    for at, character in enumerate(text):
        width -= 0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if width < 0:
            return text[:at]
    return text


def escape(text: object) -> str:
    """Return the text for HTML and SVG, inside elements and inside quoted attributes."""
    import html  # here, because a notebook's first cell imports this module, and this takes a millisecond

    return html.escape(clean(text))


# --------------------------------------------------------------------------------------------------------------------
# Words for a number of things: plurals, and lists of ranks.


def plural(count: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def plural_verb(words: str, count: int) -> str:
    """Return words that begin with `is`, `has` or `runs` for so many subjects: `have returned` for 2 of them."""
    verb, space, rest = words.partition(" ")
    return words if count == 1 else {"is": "are", "has": "have", "runs": "run"}.get(verb, verb) + space + rest


def rank_list(ranks: Iterable[int]) -> str:
    """Return `rank 2`, `ranks 0, 2` or `ranks 0-3, 7`."""
    numbers = sorted(set(ranks))
    spans: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        span = [number for _, number in group]
        spans += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(spans)


# --------------------------------------------------------------------------------------------------------------------
# Durations, sizes, shares, rates and numbers as people read them.
#
# A run reads alike in the cell, in its picture and on its page, which gets words. Half is rounded up, as JavaScript
# does, which writes the numbers below the pointer. Between a number and its unit stands an ordinary space: what is
# shown can be copied, searched for and printed anywhere.


MINUTE, HOUR = 60, 3600
NAME_LENGTH = 40
"""Characters of a metric's name in a line of metrics."""


DURATIONS = ((1e6, "µs", 1000), (1e3, "ms", 1000), (1, "s", MINUTE))
"""Each the number of its units in a second, its name, and the number of them from which the next unit is used."""
SIZES = ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))
"""Each the number of bytes in its unit, and the unit's name."""
UNIT_DIGITS, DIGITS = 3, 4
"""Significant digits of a number with a unit, and without one."""
PLAIN_RANGE = (1e-3, 1e6)
"""Sizes of a number from which and up to which it is written without an exponent."""
NOT_FINITE = "not finite"
"""On the page, where NaN and the infinities cannot be distinguished, because JSON has no word for any."""


def format_seconds(seconds: float | None) -> str:
    """Return `490 µs`, `35 ms`, `4.2 s`, `3 min 20 s` or `1 h 02 min`; empty if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if 0 < seconds < 1e-6:
        return "<1 µs"
    for factor, unit, limit in DURATIONS:
        rounded = _round(seconds * factor, UNIT_DIGITS)
        if rounded < limit and (seconds or unit == "s"):
            return f"{rounded:g} {unit}"
    whole = math.floor(seconds + 0.5)
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02d} s"
    minutes = math.floor(seconds / MINUTE + 0.5)
    return f"{minutes // MINUTE:,} h {minutes % MINUTE:02d} min"


def format_elapsed(seconds: float) -> str:
    """Return a duration that is still growing: as `format_seconds`, but from 10 s on in whole seconds."""
    return format_seconds(math.floor(seconds) if seconds >= 10 else seconds)


def format_left(seconds: float) -> str:
    """Return an estimate of the time that is left: `about 40 s left`, `about 12 min left`, `about 3 h 20 min left`."""
    if seconds < 95:
        return f"about {max(5, 5 * math.ceil(seconds / 5))} s left"
    minutes = math.ceil(seconds / MINUTE)
    whole = f"{minutes} min" if minutes < 100 else f"{minutes // MINUTE:,} h {minutes % MINUTE // 10 * 10:02d} min"
    return f"about {whole} left"


def format_bytes(number: float | None) -> str:
    """Return `12 bytes`, `1.5 kB` or `3.12 GB`: in powers of 1000, as torch and disks count; empty if unknown."""
    if number is None or not math.isfinite(number):
        return ""
    if number < 0:
        return f"-{format_bytes(-number)}"
    whole = math.floor(number + 0.5)
    if whole < 1000:
        return plural(whole, "byte")
    *smaller, (largest, name) = SIZES
    for size, unit in smaller:
        rounded = _round(number / size, UNIT_DIGITS)
        if rounded < 1000:
            return f"{rounded:g} {unit}"
    return f"{format_number(number / largest, UNIT_DIGITS)} {name}"


def format_share(share: float | None) -> str:
    """Return a part of 1 as `52.8 %`, to one decimal; only nothing is `0 %`, and only all of it `100 %`."""
    if share is None or not math.isfinite(share):
        return ""
    if 0 < share < 0.0005:
        return "<0.1 %"
    if 0.9995 <= share < 1:
        return ">99.9 %"
    percent = math.floor(share * 1000 + 0.5) / 10
    return f"{percent:.1f}".removesuffix(".0") + " %"


def format_rate(per_second: float | None) -> str:
    """Return `12.5 it/s`, or `1.6 s/it` where one iteration takes longer than a second; empty if unknown."""
    if per_second is None or not math.isfinite(per_second) or per_second <= 0:
        return ""
    if per_second >= 1:
        return f"{format_number(per_second, UNIT_DIGITS)} it/s"
    return f"{format_seconds(1 / per_second)}/it"


def format_count(number: float | None) -> str:
    """Return a whole number in full: `1,234,567`; empty if unknown."""
    return "" if number is None or not math.isfinite(number) else f"{math.floor(number + 0.5):,}"


def format_number(value: float | None, digits: int = DIGITS) -> str:
    """Return `0.1234`, `12.35`, `1,235`, `1.235e-5`, `NaN` or `∞`; empty if unknown.

    Args:
        value: Any number.
        digits: Number of digits shown; the whole part of a number below a million is shown in full.
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}∞"
    if value == 0:
        return "0"
    size = abs(value)
    if not PLAIN_RANGE[0] <= size < PLAIN_RANGE[1]:
        mantissa, _, exponent = f"{_decimal(value, digits):e}".partition("e")
        return f"{_without_zeros(mantissa)}e{int(exponent)}"
    if size >= 10 ** (digits - 1):
        return f"{Decimal(float(value)).quantize(Decimal(1), ROUND_HALF_UP):,}"
    return _without_zeros(f"{_decimal(value, digits):f}")


def format_metrics(metrics: Mapping[str, float], limit: int = 4) -> str:
    """Return `loss 0.1234, accuracy 0.98, 3 more`: the first of them, to four digits."""
    shown = [
        f"{one_line(name, NAME_LENGTH)} {format_number(value)}"
        for name, value in itertools.islice(metrics.items(), limit)
    ]
    more = len(metrics) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def format_setting(value: float | None) -> str:
    """Return a setting's value as people read it: a number, `on`, `off`, or `none`."""
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else format_number(value)


def describe_values(name: str, before: float | None, after: float | None) -> str:
    """Return `lr 0.1 → 0.05`."""
    return f"{name} {format_setting(before)} → {format_setting(after)}"


def _decimal(value: float, digits: int) -> Decimal:
    """Return the value with this many significant digits. Not `f"{value:.4g}"`, which rounds 0.5 to even."""
    return Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal_from_float(float(value))


def _round(value: float, digits: int) -> float:
    return float(_decimal(value, digits))


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


# --------------------------------------------------------------------------------------------------------------------
# Words that a user chose among others: unknown ones with the nearest, and words for true and false.


_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


def read_bool(text: str) -> bool | None:
    """Return the truth value that a word stands for (1, true, t, yes, y, on, or an opposite), None for other words."""
    word = text.strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """Return `Did you mean show?` for the known words that are close to the typed one; empty if none is.

    Words that contain the typed one come first.
    """
    words = list(known)
    close = [word for word in words if typed and typed in word]
    close = (close or difflib.get_close_matches(typed, words))[:3]
    return f"Did you mean {' or '.join(close)}?" if close else ""


def unknown(name: str, value: object, choices: Iterable[str], *, more: str = "") -> str:
    """Return the message for a value that is none of its choices, with the nearest choice and all of them.

    Args:
        name: The option's name.
        value: The value as given.
        choices: The values that it can have; their case is ignored.
        more: Words that follow the last choice, such as ` or None`.
    """
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(str(value).lower(), folded, n=1)
    hint = f" Did you mean {folded[close[0]]!r}?" if close else ""
    return f"{name}={value!r} is unknown.{hint} It can be {', '.join(map(repr, folded.values()))}{more}."


# --------------------------------------------------------------------------------------------------------------------
# A value in a few words, for messages, and for people who compare runs; the words never take long to make.


MAX_VALUE = 80
MAX_ITEMS = 6
MAX_SEARCHED = 10_000
"""Characters of a text in which secrets are looked for."""
PLAIN_MODULES = ("torch", "datetime")
"""Modules with types whose values are one word each (`torch.bfloat16`) and have no `shape`."""


def describe_value(value: Any) -> str:
    """Return `0.1`, `[1, 2, 3]`, `Tensor(3, 4)` or `Linear`.

    The value's own `repr` is not called: it may take long, fail, or copy data from a GPU.
    """
    try:
        return one_line(_Words().repr(value), MAX_VALUE)
    except Exception:  # an attribute of a foreign object may do anything
        return class_name(value)


def name_of(function: Any) -> str:
    """Return the function's name as the user knows it: `train` for `outer.<locals>.train`."""
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__qualname__", None) or type(function).__name__).rpartition("<locals>.")[2]


class _Words(reprlib.Repr):
    """The standard library's short forms of strings, numbers and lists; for other objects the type and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_VALUE

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redact(x[:MAX_SEARCHED]), level)

    def repr_list(self, x: list[Any], level: int) -> str:
        return super().repr_list(without_option_values(x[: MAX_ITEMS + 1]), level)

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        return super().repr_tuple(tuple(without_option_values(x[: MAX_ITEMS + 1])), level)

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        # Unlike in the standard library, keys are not sorted: there may be millions of them.
        items = itertools.islice(without_secrets(x.items()), MAX_ITEMS)
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        return f"{{{', '.join([*shown, *['...'] * (len(x) > len(shown))])}}}" if level > 0 or not x else "{...}"

    def repr_set(self, x: Any, level: int) -> str:  # noqa: ARG002 - as reprlib calls it
        return f"{type(x).__name__} of {len(x):,}"

    repr_frozenset = repr_set

    def repr_instance(self, x: Any, level: int) -> str:
        kind = class_name(x)
        shape = shape_of(x)
        match x:
            case None | numbers.Number() | range():
                words = super().repr_instance(x, level)
            case enum.Enum():
                words = f"{kind}.{x.name}"
            case PurePath():
                words = repr(str(x))
            case bytes() | bytearray():
                words = f"{kind} of {len(x):,}"
            case dict():
                words = self.repr_dict(x, level)
            case type() | types.FunctionType() | types.MethodType() | types.BuiltinFunctionType():
                words = name_of(x)
            case _ if shape is not None:
                words = f"{kind}{shape}"
            case _ if dataclasses.is_dataclass(x) or kind in ("SimpleNamespace", "Namespace"):
                words = f"{kind}({self._attributes(x, level)})"
            case _:
                words = super().repr_instance(x, level) if type(x).__module__ in PLAIN_MODULES else kind
        return words

    def _attributes(self, x: Any, level: int) -> str:
        if level <= 0:
            return "..."
        names = [field.name for field in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else list(vars(x))
        held = itertools.islice(without_secrets((name, getattr(x, name, None)) for name in names), MAX_ITEMS)
        return ", ".join(f"{name}={self.repr1(value, level - 1)}" for name, value in held)


# --------------------------------------------------------------------------------------------------------------------
# Advice for where the system refuses what a rank or a thread needs.


def describe_limit(number: int | None, *, on_node: bool = False) -> str:
    """Return what to do after an error of the system; empty if the number alone does not tell.

    Args:
        number: `OSError.errno`.
        on_node: True if another machine than the notebook's has the limit.
    """
    match number:
        case errno.EMFILE | errno.ENFILE:
            where = "on that machine" if on_node else "in the shell that starts Jupyter"
            return (
                "A launch needs 6 descriptors for each rank while it starts, and `ulimit -n` shows the limit: "
                f"use fewer ranks, or raise it {where}."
            )
        case errno.EAGAIN | errno.ENOMEM:
            return describe_process_limit()
        case errno.E2BIG:
            return "The environment is too large for a new process: see os.environ and env=."
    return ""


def describe_process_limit(*, for_threads: bool = False) -> str:
    """Return which limits may be reached, and what to do; `for_threads`: it was a thread that could not start."""
    counts = ", which counts threads," if for_threads else ""
    memory = ", or the limit on memory (`ulimit -v`)" if for_threads else ""
    return (
        f"The limit on processes{counts} may be reached (`ulimit -u`, or the container's pids limit){memory}. "
        "Use fewer ranks, or stop other processes."
    )


# --------------------------------------------------------------------------------------------------------------------
# Secrets by the names of variables and arguments and by the looks of their values, kept out of files and pages.
#
# Both lists are guesses. So the values of `env=` are recorded only for variables that change a launch.


LAUNCH_VARIABLES = re.compile(
    r"(ACCELERATE|CUDA|FSDP|GLOO|MKL|NCCL|NOTEBOOK_LAUNCHER|OMP|PARALLELISM_CONFIG|PYTORCH|TORCH)_\w+"
)
"""Variables that this package, Accelerate and torch read; all others are the user's."""
# Words of a name, between `_`, `-`, `.`, capitals of camelCase, and the ends; or the end of a name in one word.
_WORDS = re.compile(
    r"(?<![a-z0-9])(auth|authorization|bearer|cookie|cred|credential|dsn|jwt|key|pass|passcode|passphrase|passwd|password|pat|pwd|secret)s?\d*"
    r"(?![a-z0-9])|(?<![a-z0-9])token\d*(?![a-z0-9])|(access|api|auth|hf)_tokens(?![a-z0-9])|connection_?string"
    r"|(passphrase|passwd|password|pwd|secret|credential|cookie|oauth|sshpass|pgpass"
    r"|(access|api|auth|client|db|private|secret|ssh)(auth|key|token)|hftoken)s?\d*(?![a-z0-9])"
)
_TOKENS = re.compile(r"(?<!NUM_)(?<!MAX_)(?<!MIN_)(?<![A-Z0-9])TOKENS(?![A-Z0-9])")
"""The plural in capitals; `num_tokens` and `max_tokens` are numbers of words."""
_FOLDERS = ("PWD", "OLDPWD")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_URL = re.compile(r"(?<=://)([^/\s:@'\"]*):[^/\s'\"]+@")
_VALUES = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|(AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}"
    r"|ya29\.[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|[rs]k_live_[A-Za-z0-9]{16,}"
    r"|dop_v1_[0-9a-f]{32,}|r8_[A-Za-z0-9]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]{16,}|(?<=/api/webhooks/)\d+/[\w-]{16,}"
    r"|(?<=[Bb]earer )[\w.~+/=-]{8,}|(?<=[Bb]asic )[\w+/]{8,}={0,2}(?=['\"]|$)|(?<=AccountKey=)[\w+/=]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|$))"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS, Google, npm, PyPI, SendGrid, NVIDIA, Groq,
Stripe, DigitalOcean and Replicate, JSON web tokens, and private keys."""
_QUERY = re.compile(r"(?<=[?&])([\w-]*(?:key|token|password|secret|sig|signature)=)[^&\s'\"#]+", re.IGNORECASE)
"""Parameters in the address of a page: `?api_key=`."""
_CERTAIN = (
    r"(?<![\w-])[\w-]*?(?:passwd|passphrase|password|pwd|secret|credentials?|(?:admin|db|pg|root|smtp|ssh|user)_?pass"
    r"|(?:access|api|auth|bearer|client|hf|private|refresh|secret|session|ssh)[_-]?(?:key|token))s?\d*"
)
"""Names that are hardly ever those of anything else: in code, `key` and `token` seldom mean a secret."""
_IN_CODE = re.compile(
    rf"({_CERTAIN}['\"]?\]?\s*(?::\s*[\w.]+(?:\s*\|\s*\w+)?\s*)?[=:]\s*[bfru]?)(?P<quote>['\"])(?!\s)(?:(?!(?P=quote))[^\n\\]|\\.)"
    r"{3,}(?P=quote)",
    re.IGNORECASE,
)
"""A text in quotes that gets such a name: `api_key = "..."`, `{"password": "..."}`."""
_OPTION = re.compile(r"(?<![\w-])(--[A-Za-z][\w-]*)([ =])(?![=\s-])[^\s'\"]+")
"""A program's option with its value."""


def is_secret(name: str, value: object = "") -> bool:
    """Return True for a variable or argument whose value is kept out of files and notebooks."""
    if name in _FOLDERS:
        return False
    by_name = _WORDS.search(_CAMEL.sub("_", name).lower()) is not None or _TOKENS.search(name) is not None
    return by_name or (isinstance(value, str) and redact(value) != value)


def without_secrets(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    """Return the pairs whose names are not those of secrets."""
    return ((name, value) for name, value in items if not is_secret(str(name)))


def hidden(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables with `***` for those that are secrets."""
    return {name: "***" if is_secret(name, text) else text for name, text in env.items()}


def without_option_values(words: Iterable[Any]) -> list[Any]:
    """Return a program's words with `***` for those that follow an option of a secret's name, as `--password`."""
    shown, hides = [], False
    for word in words:
        shown.append("***" if hides else word)
        hides = isinstance(word, str) and word.startswith("--") and "=" not in word and is_secret(word)
    return shown


def redact(text: str) -> str:
    """Return a text with `***` for what it shows of secrets.

    These are passwords in URLs, what begins as known tokens do, texts that code gives the name of a password or key,
    and options of a program by such names.
    """
    text = _VALUES.sub("***", _QUERY.sub(r"\1***", _URL.sub(r"\1:***@", text)))
    text = _IN_CODE.sub(r"\1\g<quote>***\g<quote>", text)
    return _OPTION.sub(lambda found: f"{found[1]}{found[2]}***" if is_secret(found[1]) else found[0], text)


def recordable_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    """Return variables with their values for a file, and with None for those that are known by name alone."""
    return {
        name: value if LAUNCH_VARIABLES.fullmatch(name) and not is_secret(name, value) else None
        for name, value in env.items()
    }
