"""What an SGLang server leaves on a machine besides its processes: names under /dev/shm, ports, marks in environments.

Read in the sources of 0.5.9 to 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec


class SegmentName(msgspec.Struct, frozen=True):
    """The name of a shared-memory segment understood.

    ``anyones``: Python chose the name, so that any Python program may have made it. ``creator_pid`` is the pid that
    the name holds, as the creator's own pid namespace counts, or None.
    """

    what: str
    anyones: bool = False
    creator_pid: int | None = None


_SEGMENTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("multimodal data in flight", re.compile(r"sgl_shm_mm_(?P<pid>\d{1,10})_[0-9a-f]+")),
    ("broadcast queue", re.compile(r"sgl_shm_mq_(?P<pid>\d{1,10})_[0-9a-f]+")),
    ("shared buffer", re.compile(r"sgl_shm_\w+?_(?P<pid>\d{1,10})_[0-9a-f]+")),
    ("tokenizer workers' arguments", re.compile(r"multi_tokenizer_args_(?P<pid>\d{1,10})")),
    ("load snapshot", re.compile(r"sglang_loads_.+\.shm")),
    ("host KV pool", re.compile(r"sglang_host_pool_[0-9a-f]+\.mmap")),
    ("offloaded weights", re.compile(r"sglang-run-[\d.]+-\d+_op\d+")),
    ("NCCL transport", re.compile(r"nccl-\S+")),
)
_ANYONES = re.compile(r"psm_[0-9a-f]+")
"""Up to 0.5.13 SGLang let Python choose the names."""


def parse_segment(name: str) -> SegmentName | None:
    """What the name of a file under /dev/shm says; None for one that neither SGLang nor NCCL may have made."""
    for what, pattern in _SEGMENTS:
        if found := pattern.fullmatch(name):
            pid = found.groupdict().get("pid")
            return SegmentName(what, creator_pid=None if pid is None else int(pid))
    return SegmentName("Python shared memory", anyones=True) if _ANYONES.fullmatch(name) else None


RUN_ID = "SGLANG_RUN_ID"
"""Set anew by each launcher and inherited by all that it starts, so that it tells two servers apart."""

_RUN_ID = re.compile(r"sglang-run-[\d.]+-\d+")


def run_id(variables: Mapping[str, str]) -> str:
    """The launcher's mark in a process' environment, or nothing."""
    value = variables.get(RUN_ID, "")
    return value if _RUN_ID.fullmatch(value) else ""


DP_ATTENTION_DELTA = 233
_GRPC_DELTA = 10000
_MAX_PORT = 65535
_DERIVED = (
    "rendezvous (dist-init)",
    "tokenizer",
    "detokenizer",
    "rpc",
    "metrics",
    "scheduler input",
    "load collector",
)
"""What a server with DP attention listens for on the ports from its dist-init port on."""


def ports_of(port: int) -> dict[int, str]:
    """The ports that a server with ``--port`` takes or derives from it, with what each is for.

    All but the first are taken only with DP attention or over gRPC. Without those a server talks to its parts over
    sockets in the file system, and its NCCL rendezvous takes a free port.
    """
    base = port + DP_ATTENTION_DELTA if port + DP_ATTENTION_DELTA <= _MAX_PORT else port - DP_ATTENTION_DELTA
    found = {port: "HTTP server"}
    found |= {base + place: f"{what}, with DP attention" for place, what in enumerate(_DERIVED)}
    found[port + _GRPC_DELTA] = "gRPC server"
    return {number: what for number, what in found.items() if 0 < number <= _MAX_PORT}


ADOPTERS = frozenset(
    {
        "catatonit",
        "conmon",
        "containerd-shim",
        "docker-init",
        "dumb-init",
        "init",
        "s6-svscan",
        "slurmstepd",
        "supervisord",
        "systemd",
        "tini",
    }
)
"""Programs that take in processes whose parent died (the kernel's names, 15 characters at most) and start no workers
of SGLang themselves."""
