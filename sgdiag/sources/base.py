"""What every source of facts has in common."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sgdiag.model import Snapshot


class Source(Protocol):
    """One place where facts come from, usable without any other.

    ``read`` returns the part of a snapshot that this place knows: what it cannot tell stays ``NOT_ASKED``, what it
    looked for in vain is ``Unknown`` with the reason. It returns or raises ``SourceError`` within ``timeout_s``
    seconds, whatever the other side does, and never changes or pauses the server. The session calls it every
    ``period_s`` seconds from one thread; a source may keep what it needs between calls (a connection, the previous
    sample of a counter). ``close`` may be called at any time after the last ``read``.
    """

    @property
    def name(self) -> str: ...

    @property
    def period_s(self) -> float: ...

    @property
    def timeout_s(self) -> float: ...

    def read(self) -> Snapshot: ...

    def close(self) -> None: ...


@runtime_checkable
class Asking(Protocol):
    """A source whose read asks a server several questions: its first answer tells that the server is not silent."""

    @property
    def has_answered(self) -> bool: ...
