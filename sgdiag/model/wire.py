"""Snapshots and findings to JSON and back, without loss."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sgdiag.model.errors import SgdiagError
from sgdiag.model.snapshot import SCHEMA_VERSION, Snapshot

M = TypeVar("M", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()


class _SchemaOnly(msgspec.Struct):
    schema: int = SCHEMA_VERSION


def encode(thing: msgspec.Struct) -> bytes:
    """JSON of any model object. NaN and infinities, which JSON lacks, become null: sources never let them in."""
    return _encoder.encode(thing)


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
