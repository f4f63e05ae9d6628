"""What is known of one lab server, and the files that say so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from sgdiag.lab import home
from sgdiag.lab.errors import LabError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")


class Member(msgspec.Struct, frozen=True):
    """One process of a server; the start time in clock ticks since boot tells it from a later owner of its pid."""

    pid: int
    start_ticks: int


class Lab(msgspec.Struct, frozen=True):
    """One lab server, as its state file has it.

    `pid` is the launcher's, which leads the session of all its processes; `members` are those seen when it became
    ready, `shared` the files under /dev/shm that they held until then. `models` holds `target`, `draft` and
    `expected_next.json`. `ready` is False while it starts. `start_s` is the time from start to first generation.
    """

    name: str
    url: str
    port: int
    pid: int
    start_ticks: int
    mark: str
    log: str
    release: str
    speculative: bool
    topk: int
    tp: int
    accept: float
    interpreted: bool
    args: tuple[str, ...]
    models: str
    tmp_dir: str
    api_key: str | None = None
    members: tuple[Member, ...] = ()
    shared: tuple[str, ...] = ()
    ready: bool = False
    start_s: float = 0.0


Status: TypeAlias = Literal["running", "starting", "orphaned", "dead"]
"""``orphaned``: the launcher is dead and others live; run down."""


class Described(Lab, frozen=True, kw_only=True):
    """A lab server as it is shown."""

    status: Status


Listing: TypeAlias = tuple[Described, ...]


def valid_name(name: str) -> str:
    """The name itself; LabError unless it can be a file name and a part of a process mark."""
    if not _NAME.fullmatch(name):
        raise LabError(f"{name!r} is no lab name; use letters, digits, '.', '_' and '-', at most 41 of them")
    return name


def free_name(wanted: str, taken: set[str]) -> str:
    """`wanted`, or with the smallest number behind it that is not taken."""
    if wanted not in taken:
        return wanted
    number = 2
    while f"{wanted}-{number}" in taken:
        number += 1
    return f"{wanted}-{number}"


def path(name: str) -> Path:
    """The state file of a lab."""
    return home.servers_dir() / f"{valid_name(name)}.json"


def write(lab: Lab) -> None:
    """Write the state file, beside and renamed; for the owner's eyes only, because it may hold an API key."""
    file = path(lab.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".json.tmp")
    beside.touch(mode=0o600)
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(lab), indent=1))
    beside.replace(file)


def remove(name: str) -> None:
    """Forget a lab; its log stays."""
    path(name).unlink(missing_ok=True)


def read(file: Path) -> Lab | None:
    """The lab of one state file, or None if it is gone or not one of ours."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Lab)
    except (OSError, msgspec.DecodeError):
        return None


def read_all() -> list[Lab]:
    """Every lab with a state file, by name; also those whose processes are dead."""
    found = (read(file) for file in sorted(home.servers_dir().glob("*.json")))
    return [lab for lab in found if lab is not None]


def describe(lab: Lab, status: Status) -> Described:
    """The lab for output: everything but the API key itself."""
    args = ("(set)" if before == "--api-key" else word for before, word in zip(("", *lab.args), lab.args, strict=False))
    known = msgspec.structs.asdict(lab) | {
        "api_key": None if lab.api_key is None else "(set)",
        "args": tuple(args),
    }
    return Described(**known, status=status)
