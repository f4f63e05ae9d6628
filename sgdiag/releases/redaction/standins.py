"""What stands in a redacted text for a name: the same for the same name, so that equal things still look equal."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["secret", "prompt text", "host name", "address", "user name", "device id"]

KINDS: tuple[Kind, ...] = ("secret", "prompt text", "host name", "address", "user name", "device id")

_IPV4 = ipaddress.ip_network("198.18.0.0/15")
_IPV6 = ipaddress.ip_network("2001:db8::/32")
"""Ranges set aside for benchmarks and for documentation: no machine on the internet has such an address."""

_OURS = re.compile(
    r"host-\d+|user-\d+|02(?::00){2}(?::[0-9a-f]{2}){3}|(?:GPU|MIG)-00000000-0000-0000-0000-[0-9a-f]{12}", re.IGNORECASE
)


class Tally(msgspec.Struct, frozen=True):
    """How much of one kind was replaced: ``names`` that differ, ``times`` over all texts that differ."""

    names: int
    times: int


class StandIns:
    """Gives every name its stand-in and counts."""

    def __init__(self) -> None:
        self._full: dict[str, str] = {}
        self._given: dict[Kind, dict[str, str]] = {kind: {} for kind in KINDS}
        self.times: Counter[Kind] = Counter()

    def secrets(self, count: int) -> None:
        """Secrets have no stand-ins of their own; so many were replaced."""
        self.times["secret"] += count

    def prompt(self, text: str) -> str:
        self.times["prompt text"] += 1
        return f"<text, {len(text)} characters>"

    def host(self, name: str) -> str:
        """The stand-in of a host. Its short name and the first full name that goes with it are one host."""
        key = name.lower().rstrip(".")
        short = key.partition(".")[0]
        given = self._given["host name"]
        if key != short and self._full.setdefault(short, key) == key and short in given:
            given[key] = given[short]
        stand_in = self._of("host name", key, lambda number: f"host-{number}")
        given.setdefault(short, stand_in)
        return stand_in

    def user(self, name: str) -> str:
        return self._of("user name", name, lambda number: f"user-{number}")

    def address(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
        network = _IPV4 if address.version == 4 else _IPV6
        return self._of("address", address.compressed, lambda number: str(network[number % network.num_addresses]))

    def mac(self, address: str) -> str:
        """Of a network card, or any other six bytes written like that."""
        return self._of("address", address.lower(), lambda number: f"02:00:00:{_pairs(number)}")

    def device(self, uuid: str) -> str:
        kind = uuid.partition("-")[0].upper()
        return self._of("device id", uuid.lower(), lambda number: f"{kind}-00000000-0000-0000-0000-{number:012x}")

    def report(self) -> dict[Kind, Tally]:
        """What was replaced so far, by kind; kinds of which nothing was found are left out."""
        return {
            kind: Tally(len(set(self._given[kind].values())), self.times[kind]) for kind in KINDS if self.times[kind]
        }

    def _of(self, kind: Kind, key: str, make: Callable[[int], str]) -> str:
        self.times[kind] += 1
        given = self._given[kind]
        if key not in given:
            given[key] = make(len(set(given.values())) + 1)
        return given[key]


def is_stand_in(name: str) -> bool:
    """Whether ``name`` is one of ours already: what was redacted before is left as it is."""
    return _OURS.fullmatch(name) is not None


def is_ours(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address in (_IPV4 if address.version == 4 else _IPV6)


def _pairs(number: int) -> str:
    return number.to_bytes(3, "big").hex(":")
