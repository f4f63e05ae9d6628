"""Snapshots and findings to JSON and back, without loss."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from sgdiag.model.errors import SgdiagError
from sgdiag.model.snapshot import SCHEMA_VERSION, Snapshot

M = TypeVar("M", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()

_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What JSON may hold as it is, and a terminal acts upon: control characters beyond ASCII, text direction, width."""


class _SchemaOnly(msgspec.Struct):
    schema: int = SCHEMA_VERSION


def encode(thing: msgspec.Struct) -> bytes:
    """JSON of any model object, fit for a terminal. NaN and infinities, which JSON lacks, become null: sources never
    let them in."""
    text = _encoder.encode(writable(thing)).decode()
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def writable(thing: M) -> M:
    """``thing``, fit to be encoded: names of files and users may hold bytes that are no text, for which JSON has no
    form; they become question marks."""
    try:
        _encoder.encode(thing)
    except UnicodeEncodeError:
        return msgspec.convert(_as_text(msgspec.to_builtins(thing)), type(thing))
    return thing


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    return value


def decode_snapshot(data: bytes) -> Snapshot:
    """The snapshot in ``data``; raises SgdiagError for a newer schema or for something else than a snapshot."""
    try:
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
        if schema > SCHEMA_VERSION:
            raise SgdiagError(
                f"this snapshot has schema {schema}, this sgdiag reads up to {SCHEMA_VERSION}", "upgrade sgdiag"
            )
        return msgspec.json.decode(data, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise SgdiagError(f"not a snapshot: {error}") from error
