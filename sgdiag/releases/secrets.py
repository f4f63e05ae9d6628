"""Takes keys, passwords and tokens out of what a server is started with, answers and prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"api[_-]?key|password|passwd|secret|credential|authorization|(?:hf|auth|access|bearer|session)[_-]?token(?!iz)",
    re.IGNORECASE,
)

_SECRET_LAST_WORDS = frozenset({"key", "token", "secret", "password"})

# Counts of tokens and a vocabulary's special ones, which are told as text, too.
_TOKEN_OF_A_MODEL = re.compile(r"(?:.*[-_])?(?:per|first|bos|eos|pad|unk|mask|think[-_](?:start|end))[-_]token")

_SWITCH = re.compile(r"0|1|true|false|yes|no|on|off", re.IGNORECASE)
"""A variable's value that can be no secret."""

_WATERMARK_FLAGS = frozenset({"--watermark-config", "--watermark-key-b"})

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
_TOKEN = re.compile(
    # An argument such as hf_chat_template_name is no token: after hf_ those have no second underscore.
    r"\b(?:hf_|ghp_)[A-Za-z0-9]{16,256}|\b(?:sk-|glpat-)[A-Za-z0-9_-]{16,256}|(?<=Bearer )[\w.~+/=-]{8,4096}"
)
_URL_USER = re.compile(r"(?<=://)[^\s/@'\"]{1,256}:[^\s/@'\"]{1,256}(?=@)")


def is_secret_name(name: str) -> bool:
    """Whether a flag, setting or variable of this name holds a secret: ``--api-key``, ``SGLANG_ADMIN_TOKEN``."""
    if _SECRET_NAME.search(name):
        return True
    lower = name.lower()
    return re.split(r"[-_]", lower)[-1] in _SECRET_LAST_WORDS and not _TOKEN_OF_A_MODEL.fullmatch(lower)


def is_secret_setting(name: str, inside: str = "") -> bool:
    """``is_secret_name`` of what belongs to the setting ``inside``, of which some have names of their own for keys."""
    return is_secret_name(name) or (inside == "watermark" and bool(_WATERMARK_NAME.fullmatch(name)))


def redact_text(text: str) -> str:
    """``text`` with what looks like a secret replaced by ``***``: assigned values, flags, tokens, passwords in URLs."""
    for assignment in _ASSIGNMENTS:
        text = assignment.sub(lambda match: match[1] + HIDDEN, text)
    return _URL_USER.sub(HIDDEN, _TOKEN.sub(HIDDEN, text))


def redact_command(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` with the values of keys, tokens and passwords replaced."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        secret = flag.startswith("--") and (flag in _WATERMARK_FLAGS or is_secret_name(flag))
        shown.append(f"{flag}={HIDDEN}" if secret and equals else word)
        hide_next = secret and not equals
    return tuple(shown)


def redact_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables, with secrets and passwords in URLs replaced."""
    return {
        name: HIDDEN if is_secret_name(name) and not _SWITCH.fullmatch(value) else redact_text(value)
        for name, value in environment.items()
    }


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with each secret replaced, at any depth. What is not set, and numbers, stay as they are."""
    return {name: _redact(name, value) for name, value in values.items()}


def _redact(name: str, value: Any, *, inside: str = "", secret: bool = False) -> Any:
    secret = secret or is_secret_setting(name, inside)
    if secret and value and isinstance(value, (str, bytes, dict)):
        return HIDDEN
    if isinstance(value, dict):
        return {str(key): _redact(str(key), item, inside=name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact("", item, inside=name, secret=secret) for item in value]
    return redact_text(value) if isinstance(value, str) else value
