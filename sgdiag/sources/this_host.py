"""Whether an address leads to this host, told without asking any other."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def is_this_host(host: str) -> bool:
    """Whether ``host``, a name or an address without brackets, is this one for certain.

    The address that stands for all of a host's counts: servers name it in their logs, and clients reach them at it.
    """
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    own = {item.address.partition("%")[0] for items in psutil.net_if_addrs().values() for item in items}
    return address.is_loopback or address.is_unspecified or host in own
