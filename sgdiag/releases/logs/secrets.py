"""Takes keys, passwords and tokens out of what SGLang prints."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"api[_-]?key|password|passwd|secret|credential|authorization|(?:hf|auth|access|bearer|session)[_-]?token",
    re.IGNORECASE,
)

# Inside a "watermark" setting the signing keys have these plain names.
_WATERMARK_NAME = re.compile(r"key(_[a-z])?")

# The bounds keep a hostile line from being walked many times; a value may be cut at the end of the text.
_NAME = rf"(?:{_SECRET_NAME.pattern})[\w-]{{0,40}}"
_QUOTED = r"""\\?(?:'(?:[^'\\]|\\.){0,4096}(?:'|\\?\Z)|"(?:[^"\\]|\\.){0,4096}(?:"|\\?\Z))"""
_BARE = r"""(?!(?:None|null|True|False)\b)[^\s,;'"&)}\]]{1,4096}"""

_ASSIGNMENTS = (
    re.compile(rf"""({_NAME}\\?["']?\s{{0,3}}[=:]\s{{0,3}})(?:Bearer\s+)?(?:{_QUOTED}|{_BARE})""", re.IGNORECASE),
    re.compile(rf"(--(?:\w[\w-]{{0,40}}?-)?{_NAME}\s{{1,3}})(?!-)(?:{_QUOTED}|{_BARE})", re.IGNORECASE),
    re.compile(rf"""(\bkey(?:_[a-z])?["']?\s?[=:]\s?){_QUOTED}"""),
)
_TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_|glpat-)[A-Za-z0-9_-]{16,256}|(?<=Bearer )[\w.~+/=-]{8,4096}")
_URL_USER = re.compile(r"(?<=://)[^\s/@'\"]{1,256}:[^\s/@'\"]{1,256}(?=@)")


def redact_text(text: str) -> str:
    """``text`` with what looks like a secret replaced by ``***``: assigned values, flags, tokens, passwords in URLs."""
    for assignment in _ASSIGNMENTS:
        text = assignment.sub(lambda match: match[1] + HIDDEN, text)
    return _URL_USER.sub(HIDDEN, _TOKEN.sub(HIDDEN, text))


def redact_values(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with each secret replaced, at any depth; what is not set stays as it is."""
    return {name: _redact(name, value, inside="") for name, value in values.items()}


def _redact(name: str, value: Any, *, inside: str) -> Any:
    secret = _SECRET_NAME.search(name) or (inside == "watermark" and _WATERMARK_NAME.fullmatch(name))
    if secret and value and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, dict):
        return {str(key): _redact(str(key), item, inside=name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact("", item, inside=name) for item in value]
    return redact_text(value) if isinstance(value, str) else value
