"""The figures in two kinds of message whose wording differs by release: torch's on device memory, SGLang's on slots."""

from __future__ import annotations

import re

import msgspec

from sgdiag.releases.logs.numbers import real, whole

_UNITS = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_SIZE = r"(\d[\d.]*) (bytes|[KMGT]iB)"

# Up to torch 2.1 the figures stood in brackets; "capacty" is torch's own slip of the pen.
_ASKED = re.compile(rf"(?:Tried to allocate|while allocating|\bwanted) {_SIZE}")
_CAPACITY = re.compile(rf"total capaci?ty of {_SIZE}|{_SIZE} total\b|free of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} free\b")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"[Oo]f the allocated memory {_SIZE}|{_SIZE} (?:already )?allocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_PROCESS = re.compile(rf"\bProcess (\d+) has {_SIZE} memory in use")


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """What torch says when an allocation fails; None for what it leaves out. ``own_bytes`` is all of this process,
    ``pooled_bytes`` what torch's allocator holds of it; ``others`` are other processes on the device, by pid."""

    asked_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    pooled_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()

    @property
    def others_bytes(self) -> int:
        return sum(size for _, size in self.others)

    @property
    def missing_bytes(self) -> int | None:
        """What is neither free nor this process's, whoever holds it; where torch does not say what this process has
        in all, its CUDA context and libraries (NCCL) are in it."""
        mine = self.own_bytes if self.own_bytes is not None else self.pooled_bytes
        if self.capacity_bytes is None or self.free_bytes is None or mine is None:
            return None
        return max(0, self.capacity_bytes - self.free_bytes - mine)


def shortage(text: str) -> Shortage:
    """The figures of an "out of memory" message.

    In a container torch does not know its own process and lists it like the others; it is the one that holds just
    over what torch itself has allocated.
    """
    allocated = _bytes(_ALLOCATED, text)
    own = _bytes(_OWN, text)
    listed = tuple((int(pid), _size(number, unit)) for pid, number, unit in _PROCESS.findall(text))
    if own is None and listed:
        mine = min(
            (entry for entry in listed if entry[1] >= (allocated or 0)),
            key=lambda entry: entry[1],
            default=None,
        )
        if mine is not None:
            own, listed = mine[1], tuple(entry for entry in listed if entry != mine)
    return Shortage(
        asked_bytes=_bytes(_ASKED, text),
        capacity_bytes=_bytes(_CAPACITY, text),
        free_bytes=_bytes(_FREE, text),
        own_bytes=own,
        pooled_bytes=_pooled(text, allocated),
        others=listed,
    )


def _pooled(text: str, allocated: int | None) -> int | None:
    reserved = _bytes(_RESERVED, text)
    if reserved is not None or allocated is None:
        return reserved
    return allocated + (_bytes(_UNUSED, text) or 0)


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = (part for part in match.groups() if part is not None)
    return _size(number, unit)


def _size(number: str, unit: str) -> int:
    return round((real(number.rstrip(".")) or 0.0) * (1 << _UNITS[unit]))


class SlotAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's slots as SGLang's check adds them up. ``available`` are the free ones; ``held`` those of sessions and
    of running requests; what a release does not name is 0."""

    pool: str
    total: int
    available: int
    evictable: int = 0
    protected: int = 0
    held: int = 0

    @property
    def surplus(self) -> int:
        """Slots accounted for beyond the pool's size: above 0 some were freed twice, below 0 some are lost."""
        return self.available + self.evictable + self.protected + self.held - self.total


_PAIR = re.compile(r"([A-Za-z_][\w.]*(?:\(\))?)=(-?\d+)")
_LABEL = re.compile(r"^\[(?P<pool>[\w-]+)\] ")

# The part of a name that says what the number is; the first that fits decides.
_ROLES: tuple[tuple[str, str], ...] = (
    ("max_total_num_token", "total"),
    ("tokens_per_layer", "total"),
    ("total_size", "total"),
    ("total_tokens", "sum"),
    ("allocator.size", "total"),
    ("mamba_pool.size", "total"),
    ("protected", "protected"),
    ("evictable", "evictable"),
    ("available", "available"),
    ("session_held", "held"),
    ("uncached", "held"),
    ("total", "total"),
)


def slot_account(text: str) -> SlotAccount | None:
    """The account on one line of SGLang's check; None where it lacks the total or the free slots."""
    label = _LABEL.match(text)
    found: dict[str, int] = {}
    for name, number in _PAIR.findall(text):
        value = whole(number.removeprefix("-"))
        role = next((role for part, role in _ROLES if part in name), "")
        if role and value is not None:
            value = -value if number.startswith("-") else value
            found[role] = found.get(role, 0) + value if role == "held" else found.setdefault(role, value)
    if "total" not in found:
        return None
    if "sum" in found:
        return SlotAccount(pool="token", total=found["total"], available=found["sum"])
    if "available" not in found:
        return None
    pool = label["pool"] if label else _pool(text)
    # Up to 0.4.6 "available" had the evictable slots in it, and protected ones counted with HiCache only.
    merged = "evictable" not in found and pool != "request"
    return SlotAccount(
        pool=pool,
        total=found["total"],
        available=found["available"],
        evictable=found.get("evictable", 0),
        protected=0 if merged and found["available"] >= found["total"] else found.get("protected", 0),
        held=found.get("held", 0),
    )


def _pool(text: str) -> str:
    if "total_size=" in text:
        return "request"
    return "swa" if "swa_" in text else "mamba" if "mamba_available" in text else "token"
