"""Values out of a server's memory without keys, passwords and tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

from sgdiag.releases.secrets import HIDDEN, is_secret_name, is_secret_setting, redact_text
from sgdiag.remote import Instance, Items, Member, Octets, Pairs, Text, Value


def without_secrets(path: str, value: Value) -> Value:
    """What ``path`` leads to, with ``***`` for all text and bytes at any depth below a secret name on the path or in
    the value. Numbers, tensors and names of types and functions stay: under such a name they are no secrets."""
    steps = ["", *re.split(r"""[][.()"']+""", path)]
    hide = any(is_secret_setting(name, inside) for inside, name in pairwise(steps))
    return _shown(value, hide=hide, inside=next(filter(None, reversed(steps)), ""))


def _shown(value: Value, *, hide: bool, inside: str = "") -> Value:
    match value:
        case str() | Text() | Octets():
            return _text(value, hide=hide)
        case Items():
            before = ("", *map(_name, value.items))
            hidden = (hide or _names_next(name, len(value.items)) for name in before)
            items = (_shown(item, hide=each) for item, each in zip(value.items, hidden, strict=False))
            return replace(value, items=tuple(items))
        case Pairs():
            pairs = ((_shown(key, hide=hide), _below(_name(key), item, hide, inside)) for key, item in value.pairs)
            return replace(value, pairs=tuple(pairs))
        case Instance():
            attributes = tuple((name, _below(name, item, hide, inside)) for name, item in value.attributes)
            return replace(value, attributes=attributes, value=_shown(value.value, hide=hide))
    return value


def _below(name: str, value: Value, hide: bool, inside: str) -> Value:
    return _shown(value, hide=hide or is_secret_setting(name, inside), inside=name)


def _names_next(name: str, items: int) -> bool:
    """Whether an item of so many is a name whose secret comes next: in a pair, or as a flag in a command line."""
    return (items == 2 or name.startswith("--")) and is_secret_name(name)


def _text(value: str | Text | Octets, *, hide: bool) -> Value:
    if isinstance(value, str):
        return HIDDEN if hide and value else redact_text(value)
    if isinstance(value, Text):
        return HIDDEN if hide else replace(value, beginning=redact_text(value.beginning))
    text = value.beginning.decode("latin-1")
    return HIDDEN if text and (hide or redact_text(text) != text) else value


def _name(key: Value) -> str:
    """The name that a key of a dict or an item may be; HTTP's headers are named by bytes."""
    match key:
        case str():
            return key
        case Octets():
            return key.beginning.decode("latin-1")
        case Member():
            return key.name
    return ""
