"""The shared-memory file in which schedulers publish their load, from 0.5.13 on.

A header (magic, version, number of data-parallel workers, bytes per slot), then one slot a worker: the length of
its payload and the payload, a msgpack map without the fields that hold their default. Read in the sources of 0.5.13,
0.5.15, 0.5.18, 0.5.20, 0.5.22 and 0.5.23; the version is 2 in all of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SINCE = "0.5.13"
MAGIC, VERSION = b"SLNS", 2
HEADER = struct.Struct("<4sHHI")
LENGTH = struct.Struct("<I")
FILE_NAME = re.compile(r"/dev/shm/sglang_loads_[^/]*\.shm")  # noqa: S108 - where SGLang puts it

_SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "memory": ("weight_gb", "kv_cache_gb", "graph_gb", "token_capacity"),
        "speculative": ("accept_length", "accept_rate"),
        "queues": ("waiting", "grammar", "paused", "retracted", "prealloc_ready"),
    }
)
"""From 0.5.18 on each section is an array in this order, which newer releases may lengthen."""

_FLAT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "memory": ("has_memory", "memory_"),
        "speculative": ("has_speculative", "speculative_"),
        "queues": ("has_queues", "queue_"),
    }
)
"""Before, each section was a flag and keys with a prefix."""

DEFAULTS = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage", "dp_rank")
"""Fields that are left out where they are 0; without ``timestamp`` a worker has published nothing yet."""


def entry(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A payload of any release in the form of an entry of ``/v1/loads``: sections as nested maps."""
    told: dict[str, Any] = {**dict.fromkeys(DEFAULTS, 0), **payload}
    for section, names in _SECTIONS.items():
        flag, prefix = _FLAT[section]
        values = payload.get(section)
        if isinstance(values, list):
            told[section] = dict(zip(names, values, strict=False))
        elif payload.get(flag):
            told[section] = {name: payload.get(prefix + name, 0) for name in names}
        else:
            told.pop(section, None)
    return told
