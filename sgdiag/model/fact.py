"""One value with its source, or the reason why it is not known.

A number without an origin cannot be trusted and a missing number must not look like zero, so every value that
sgdiag shows is a ``Fact``: either ``Known`` (value, source, how and when it was learned) or ``Unknown`` (a reason
that a user can act on).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, NoReturn, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")

How: TypeAlias = Literal["measured", "derived", "assumed"]


class Known(msgspec.Struct, Generic[T_co], frozen=True, tag="known", tag_field="is", omit_defaults=True):
    """A value that some source gave.

    ``source`` names the place so that a user can look there too: ``metrics:sglang:token_usage``, ``log:12``,
    ``nvml``, ``environ``, ``server_info:page_size``. ``at`` is the unix time in seconds at which the value was true
    (0.0: it holds for the life of the process).
    """

    value: T_co
    source: str
    how: How = "measured"
    at: float = 0.0

    def or_else(self, default: object) -> T_co:  # noqa: ARG002 - the twin of Unknown.or_else
        return self.value

    def map(self, change: Callable[[T_co], U], *, source: str | None = None) -> Known[U]:
        """The value changed by ``change``; it counts as derived from the same source."""
        return Known(change(self.value), source or self.source, "derived", self.at)


class Unknown(msgspec.Struct, frozen=True, tag="unknown", tag_field="is"):
    """No value, and why: ``no NVIDIA driver on this machine``, ``on another host``, ``not reported before 0.5.13``."""

    reason: str

    @property
    def value(self) -> NoReturn:
        raise LookupError(f"unknown: {self.reason}")

    def or_else(self, default: U) -> U:
        return default

    def map(self, change: object, *, source: str | None = None) -> Unknown:  # noqa: ARG002 - the twin of Known.map
        return self


Fact: TypeAlias = Known[T] | Unknown

NOT_ASKED = Unknown("not told by any source here")
"""What a field holds until a source says something about it; any other reason is worth more than this one."""


def unknown(reason: str) -> Unknown:
    return Unknown(reason)


def combine(change: Callable[..., U], *facts: Known[object] | Unknown, source: str) -> Known[U] | Unknown:
    """``change`` applied to the values of all ``facts``; the first unknown one decides otherwise."""
    values = []
    at = 0.0
    for fact in facts:
        if isinstance(fact, Unknown):
            return fact
        values.append(fact.value)
        at = max(at, fact.at)
    return Known(change(*values), source, "derived", at)
