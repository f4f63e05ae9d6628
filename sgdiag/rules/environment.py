"""Do the variables that the ranks communicate by make sense here?

NCCL takes the digits at the start of a value and ignores the rest: ``true`` counts as 0, ``4MB`` as 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sgdiag.model import Advice, Finding, Known, Snapshot
from sgdiag.releases.nccl.environment import (
    ALL_P2P_LEVELS,
    BUFFER_DEFAULT_BYTES,
    LL128_STEP_BYTES,
    NUMBERS,
    P2P_LEVELS,
    SWITCHES,
)
from sgdiag.releases.versions import at_least
from sgdiag.rules.evidence import gpus_of, seen
from sgdiag.rules.registry import rule

_SIZE = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)")

Problem = tuple[str, Advice]
"""What is wrong in words, and what to set instead."""


@rule("nccl-environment-wrong", "nccl-version-fabric-or-network")
def nccl_environment_wrong(snapshot: Snapshot) -> Finding | None:
    environment = snapshot.collectives.environment
    if not isinstance(environment, Known):
        return None
    variables = environment.value
    problems = [
        *_numbers(variables),
        *_sizes(variables),
        *_interfaces(snapshot, variables),
        *_topology(snapshot, variables),
    ]
    if not problems:
        return None
    return Finding(
        id="nccl-environment-wrong",
        title="the ranks' environment holds settings that NCCL or Gloo cannot follow",
        verdict="WARN",
        confidence=0.85,
        evidence=tuple(seen(environment, text) for text, _ in problems),
        cause=(
            "these variables are taken as something else than was meant, or ask for what this machine does not have; "
            "NCCL says so only with NCCL_DEBUG=INFO, Gloo when it fails"
        ),
        advice=tuple(dict.fromkeys(advice for _, advice in problems)),
    )


def _numbers(variables: Mapping[str, str]) -> Iterator[Problem]:
    for name in sorted(NUMBERS & variables.keys()):
        text = variables[name].strip()
        if not text or _SIZE.fullmatch(text) or (name == "NCCL_P2P_LEVEL" and text.upper() in ALL_P2P_LEVELS):
            continue
        counts_as = _as_nccl(text)
        if name in SWITCHES and text.lower() in ("true", "yes", "on"):
            yield f"{name}={text} counts as 0: it does not switch anything on", Advice("write the number", f"{name}=1")
        elif name == "NCCL_P2P_LEVEL":
            yield (
                f"{name}={text} is none of {', '.join(P2P_LEVELS)}",
                Advice("name one of the levels, or unset it", "NCCL_P2P_LEVEL=SYS"),
            )
        elif name in SWITCHES and text.lower() in ("false", "no", "off"):
            continue
        else:
            yield f"{name}={text} counts as {counts_as}", Advice("write a plain number", f"unset {name}")


def _as_nccl(text: str) -> int:
    """The number that NCCL reads at the start of ``text``."""
    match = _SIZE.match(text)
    return int(match[0], 16 if "x" in match[0].lower() else 10) if match else 0


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "").strip()
    return _as_nccl(text) if _SIZE.fullmatch(text) else None


def _sizes(variables: Mapping[str, str]) -> Iterator[Problem]:
    ll128 = _number(variables, "NCCL_LL128_BUFFSIZE")
    if ll128 is not None and ll128 > 0 and ll128 % LL128_STEP_BYTES:
        # A power of two of steps: other multiples were seen to hang.
        fitting = LL128_STEP_BYTES << max((ll128 // LL128_STEP_BYTES).bit_length() - 1, 0)
        yield (
            f"NCCL_LL128_BUFFSIZE={ll128} is no multiple of {LL128_STEP_BYTES}: LL128 then hangs or gives wrong sums",
            Advice("unset it, or make it 120 times a power of two", f"NCCL_LL128_BUFFSIZE={fitting}"),
        )
    for name in ("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE"):
        size = _number(variables, name)
        if size is not None and size <= 0:
            yield (
                f"{name}={size} is no size",
                Advice("unset it", f"unset {name}", f"default {BUFFER_DEFAULT_BYTES[name]}"),
            )
    least, most = _number(variables, "NCCL_MIN_NCHANNELS"), _number(variables, "NCCL_MAX_NCHANNELS")
    if most is not None and most < 1:
        yield f"NCCL_MAX_NCHANNELS={most}: NCCL takes 1", Advice("unset it", "unset NCCL_MAX_NCHANNELS")
    elif least is not None and most is not None and least > most:
        yield (
            f"NCCL_MIN_NCHANNELS={least} is above NCCL_MAX_NCHANNELS={most}",
            Advice("let the two agree", f"NCCL_MIN_NCHANNELS={most}"),
        )


def _interfaces(snapshot: Snapshot, variables: Mapping[str, str]) -> Iterator[Problem]:
    gloo = variables.get("GLOO_SOCKET_IFNAME", "").strip()
    here = snapshot.collectives.interfaces
    if gloo.startswith(("^", "=")):
        example = _concrete(snapshot)
        yield (
            f"GLOO_SOCKET_IFNAME={gloo}: only NCCL knows exclusions, Gloo looks for an interface of that name",
            Advice("name one interface", f"GLOO_SOCKET_IFNAME={example}", "Gloo finds an address"),
        )
    elif gloo and isinstance(here, Known):
        missing = [name for name in gloo.split(",") if name and name not in here.value]
        if missing:
            yield (
                f"GLOO_SOCKET_IFNAME={gloo}: the process sees {', '.join(here.value)} only",
                Advice("name one that exists", f"GLOO_SOCKET_IFNAME={_concrete(snapshot)}"),
            )
    nccl = variables.get("NCCL_SOCKET_IFNAME", "").strip()
    if not nccl or nccl.startswith("^") or not isinstance(here, Known):
        return
    exact = nccl.startswith("=")
    names = [name.partition(":")[0] for name in nccl.lstrip("=").split(",") if name]
    if not any(each == name if exact else each.startswith(name) for name in names for each in here.value):
        yield (
            f"NCCL_SOCKET_IFNAME={nccl} fits none of {', '.join(here.value)}",
            Advice("name one that exists, or unset it", f"NCCL_SOCKET_IFNAME={_concrete(snapshot)}"),
        )


def _concrete(snapshot: Snapshot) -> str:
    """An interface of the process that is neither loopback nor a bridge of containers."""
    names = snapshot.collectives.interfaces.or_else(())
    return next((name for name in names if not name.startswith(("lo", "docker", "veth", "br-"))), "INTERFACE")


def _topology(snapshot: Snapshot, variables: Mapping[str, str]) -> Iterator[Problem]:
    custom = [item for item in snapshot.collectives.communicators if item.custom_allreduce.or_else("") == "on"]
    if (_number(variables, "NCCL_P2P_DISABLE") or 0) > 0 and custom:
        yield (
            "NCCL_P2P_DISABLE=1 holds for NCCL only: SGLang's custom allreduce goes over P2P nevertheless",
            Advice(
                "if P2P does not work here, switch that off, too",
                "--disable-custom-all-reduce",
                "nothing uses P2P any more",
            ),
        )
    links = [gpu.nvlinks_up.value for gpu in gpus_of(snapshot) if isinstance(gpu.nvlinks_up, Known)]
    if (_number(variables, "NCCL_NVLS_ENABLE") or 0) == 1 and links and not any(links):
        yield (
            "NCCL_NVLS_ENABLE=1 asks for NVLink SHARP, and no GPU here has an NVLink that is up",
            Advice("leave it to NCCL", "unset NCCL_NVLS_ENABLE", "or drop --enable-nccl-nvls, which sets it"),
        )


_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OFF = ("0", "false", "no", "n")
"""What SGLang takes for off in a variable of its own."""

_EXPANDABLE = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*true\b", re.IGNORECASE)

SHAREABLE_SINCE = "0.5.14"
"""From here on the second version of custom allreduce, which wants NVLink, exchanges handles of such memory."""


@rule("expandable-segments-custom-allreduce", "custom-allreduce")
def expandable_segments(snapshot: Snapshot) -> Finding | None:
    environment = snapshot.collectives.environment
    if not isinstance(environment, Known) or snapshot.server.tp_size.or_else(1) < 2:
        return None
    if snapshot.server.health.or_else("") == "up":
        return None  # its graphs are captured, which is where it would have failed
    name = next((each for each in _ALLOCATOR_VARIABLES if _EXPANDABLE.search(environment.value.get(each, ""))), None)
    off = snapshot.server.args.or_else({}).get("disable_custom_all_reduce") is True
    told = [item.custom_allreduce for item in snapshot.collectives.communicators if item.group == "tp"]
    if name is None or off or any(isinstance(fact, Known) and fact.value != "on" for fact in told):
        return None
    links = [gpu.nvlinks_up.value for gpu in gpus_of(snapshot) if isinstance(gpu.nvlinks_up, Known)]
    first = environment.value.get("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "").lower() in _OFF
    without_links = bool(links) and not any(links)
    if not first and not without_links and at_least(snapshot.server.release.or_else(""), SHAREABLE_SINCE):
        return None
    return Finding(
        id="expandable-segments-custom-allreduce",
        title="custom allreduce cannot share memory of expandable segments",
        verdict="WARN",
        confidence=0.7,
        evidence=(seen(environment, f"{name}={environment.value[name]}"),),
        cause=(
            "torch then takes memory from ranges that cudaIpcGetMemHandle refuses, and the custom allreduce registers "
            f"buffers of CUDA graphs by it; its second version knows another way from {SHAREABLE_SINCE} on"
        ),
        told="SGLang reports it as a failed graph capture, with hints about memory that do not help",
        advice=(
            Advice("unset it", f"unset {name}", "graphs are captured with custom allreduce"),
            Advice("or do without custom allreduce", "--disable-custom-all-reduce", "allreduces go through NCCL"),
        ),
    )
