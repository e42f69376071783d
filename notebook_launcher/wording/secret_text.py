"""Secrets by the names of variables and arguments and by the looks of their values, kept out of files and pages.

Both lists are guesses. So the values of `env=` are recorded only for variables that change a launch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["LAUNCH_VARIABLES", "is_secret", "recordable_variables", "redact", "without_secrets"]

LAUNCH_VARIABLES = re.compile(
    r"(ACCELERATE|CUDA|FSDP|GLOO|MKL|NCCL|NOTEBOOK_LAUNCHER|OMP|PARALLELISM_CONFIG|PYTORCH|TORCH)_\w+"
)
"""Variables that this package, Accelerate and torch read; all others are the user's."""
# Words of a name, between `_`, `-`, `.`, capitals of camelCase, and the ends; or the end of a name in one word.
_WORDS = re.compile(
    r"(?<![a-z0-9])(auth|bearer|cookie|cred|credential|dsn|jwt|key|pass|passcode|passphrase|passwd|password|pat|pwd|secret)s?\d*"
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
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|$))"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS, Google, npm, PyPI, SendGrid, NVIDIA, Groq,
Stripe, DigitalOcean and Replicate, JSON web tokens, and private keys."""
_QUERY = re.compile(r"(?<=[?&])([\w-]*(?:key|token|password|secret|sig|signature)=)[^&\s'\"#]+", re.IGNORECASE)
"""Parameters in the address of a page: `?api_key=`."""


def is_secret(name: str, value: object = "") -> bool:
    """Return True for a variable or argument whose value is kept out of files and notebooks."""
    if name in _FOLDERS:
        return False
    by_name = _WORDS.search(_CAMEL.sub("_", name).lower()) is not None or _TOKENS.search(name) is not None
    return by_name or (isinstance(value, str) and redact(value) != value)


def without_secrets(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    """Return the pairs whose names are not those of secrets."""
    return ((name, value) for name, value in items if not is_secret(str(name)))


def redact(text: str) -> str:
    """Return a text with `***` for passwords in its URLs and for what begins as known tokens do."""
    return _VALUES.sub("***", _QUERY.sub(r"\1***", _URL.sub(r"\1:***@", text)))


def recordable_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    """Return variables with their values for a file, and with None for those that are known by name alone."""
    return {
        name: value if LAUNCH_VARIABLES.fullmatch(name) and not is_secret(name, value) else None
        for name, value in env.items()
    }
