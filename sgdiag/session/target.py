"""What a user means by TARGET."""

from __future__ import annotations

from pathlib import Path

import msgspec
from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from sgdiag.analysis.format import parse_duration
from sgdiag.model import Fact, Known, SgdiagError, unknown
from sgdiag.sources.this_host import is_this_host


class PidTarget(msgspec.Struct, frozen=True):
    pid: int


class UrlTarget(msgspec.Struct, frozen=True):
    url: str


class FileTarget(msgspec.Struct, frozen=True):
    """A log or a recording; ``at_s`` is a moment of the latter, in seconds after its beginning (None: the last)."""

    path: Path
    at_s: float | None = None


def parse_target(text: str) -> PidTarget | UrlTarget | FileTarget:
    """A pid, an address, a file, or a recording at a moment (``FILE@90s``); raises SgdiagError for anything else."""
    if text.isascii() and text.isdigit():
        return PidTarget(int(text))
    if text.lower().startswith(("http://", "https://")):
        return UrlTarget(text)
    path = Path(text)
    if path.is_file():
        return FileTarget(path)
    file, at, moment = text.rpartition("@")
    if at and (seconds := parse_duration(moment)) is not None and Path(file).is_file():
        return FileTarget(Path(file), seconds)
    host, colon, port = text.rpartition(":")
    if colon and host and "/" not in host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
        return UrlTarget(f"http://{text}")
    if text and path.is_dir():
        raise SgdiagError(f"{text} is a folder", "give a log file or a recording in it")
    raise SgdiagError(
        f"{text!r} is no command, no pid, no address and no file", "sgdiag --help lists the commands and targets"
    )


def port_here(url: str) -> int | None:
    """The port of ``url`` if its host is this one, by name or address; None for another host."""
    try:
        parts = parse_url(url)
    except LocationParseError:
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return port if is_this_host((parts.host or "").strip("[]")) else None


def url_here(told: Fact[str]) -> Fact[str]:
    """The address in a server's command line where it is this host's for certain. Any user of the host can write a
    command line that names another one, and keys are for the server that runs here."""
    if isinstance(told, Known) and port_here(told.value) is None:
        return unknown(f"{told.value} is not known to be this host; give it with --url if it is")
    return told
