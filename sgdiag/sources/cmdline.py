"""What a launcher's command line says about its server."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from sgdiag.model import NOT_ASKED, Fact, Known, Rank, RankId, Server, Unknown, combine, unknown
from sgdiag.releases.arguments import WATCHED_NAMES
from sgdiag.releases.processes import DEFAULT_HOST, DEFAULT_PORT, Launch, local_ranks, settings

SOURCE = "procfs:cmdline"
MAX_RANKS = 4096
"""Most ranks that a server is believed to have."""

ON_ANOTHER_HOST = unknown("on another host")

T = TypeVar("T")


class CommandLine(msgspec.Struct, frozen=True, kw_only=True):
    """A server's settings as far as its command line gives them, and this host's number among its hosts."""

    server: Server
    node_rank: Fact[int]


def read_command_line(launch: Launch) -> CommandLine:
    """The settings in ``launch``; some that it leaves open are assumed to be SGLang's fixed defaults.

    With ``--config`` nothing is assumed, since the file may set it and is not read.
    """
    given = _Given(settings(launch.args))
    plain_dp, attention_dp = given.or_default("dp_size", _count, 1), given.or_default("attn_dp_size", _count, 1)
    return CommandLine(
        server=Server(
            url=combine(
                lambda host, port, certificate: _url(host, port, secure=bool(certificate)),
                given.or_default("host", str, DEFAULT_HOST),
                given.or_default("port", _port, DEFAULT_PORT),
                given.or_default("ssl_certfile", str, ""),
                source=SOURCE,
            ),
            model_path=given.fact("model_path", str),
            served_model_name=given.fact("served_model_name", str),
            device=given.fact("device", str),
            tp_size=given.or_default("tp_size", _count, 1),
            dp_size=plain_dp if "attn_dp_size" not in given.values else _product(plain_dp, attention_dp),
            pp_size=given.or_default("pp_size", _count, 1),
            ep_size=given.fact("ep_size", _count),
            nnodes=given.or_default("nnodes", _count, 1),
            dp_attention=given.or_default("enable_dp_attention", bool, False)
            if "attn_dp_size" not in given.values
            else attention_dp.map(lambda size: size > 1),
            mem_fraction_static_ratio=given.fact("mem_fraction_static", _ratio),
            context_len_tokens=given.fact("context_length", _count),
            chunked_prefill_tokens=given.fact("chunked_prefill_size", int),
            max_prefill_tokens=given.fact("max_prefill_tokens", _count),
            attention_backend=given.fact("attention_backend", str),
            scheduler_overlap=given.fact("disable_overlap_schedule", lambda _: False),
            asked=Known({name: text for name, text in given.values.items() if name in WATCHED_NAMES}, SOURCE),
        ),
        node_rank=given.or_default("node_rank", int, 0),
    )


class _Given:
    """Settings by field name, as facts."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def fact(self, name: str, convert: Callable[[str], T]) -> Fact[T]:
        if name in self.values:
            try:
                return Known(convert(self.values[name]), SOURCE)
            except ValueError:
                return unknown(f"the command line gives {self.values[name]!r} for {name}, which is not understood")
        if "config" in self.values:
            return unknown(f"not on the command line; {self.values['config']} may set it and is not read")
        return NOT_ASKED

    def or_default(self, name: str, convert: Callable[[str], T], default: T) -> Fact[T]:
        fact = self.fact(name, convert)
        return Known(default, SOURCE, "assumed") if fact is NOT_ASKED else fact


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65536:
        raise ValueError(text)
    return number


def _ratio(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError(text)
    return number


def _product(first: Fact[int], second: Fact[int]) -> Fact[int]:
    return combine(lambda one, other: one * other, first, second, source=SOURCE)


def _url(host: str, port: int, *, secure: bool) -> str:
    """Where a client on the same host reaches a server that listens on ``host``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        shown = host
    else:
        if address.is_unspecified:
            shown = "127.0.0.1" if address.version == 4 else "[::1]"
        else:
            shown = f"[{host}]" if address.version == 6 else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"


def remote_ranks(line: CommandLine) -> tuple[Rank, ...]:
    """The ranks that run on other hosts, all of whose facts are unknown here; none for a server on one host."""
    server = line.server
    sizes = (server.nnodes, line.node_rank, server.tp_size, server.pp_size)
    if any(isinstance(fact, Unknown) for fact in sizes):
        return ()
    nnodes, node_rank, tp_size, pp_size = (int(fact.value) for fact in sizes)
    if nnodes == 1 or tp_size * pp_size > MAX_RANKS:
        return ()
    _, elsewhere = local_ranks(tp_size=tp_size, pp_size=pp_size, nnodes=nnodes, node_rank=node_rank)
    dp_size = server.dp_size.or_else(1) if server.dp_attention.or_else(False) else 1
    per_group = max(tp_size // dp_size, 1)
    ids = sorted(RankId(dp=tp // per_group if dp_size > 1 else 0, pp=pp, tp=tp) for pp, tp in elsewhere)
    return tuple(_all_unknown(Rank(id=rank), ON_ANOTHER_HOST) for rank in ids)


P = TypeVar("P", bound=msgspec.Struct)


def _all_unknown(part: P, reason: Unknown) -> P:
    """``part`` with every fact that nobody was asked for set to ``reason``, in the parts of it as well."""
    changes: dict[str, object] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if value == NOT_ASKED:
            changes[name] = reason
        elif isinstance(value, msgspec.Struct) and not isinstance(value, RankId):
            changes[name] = _all_unknown(value, reason)
    return msgspec.structs.replace(part, **changes)
