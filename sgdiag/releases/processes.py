"""What SGLang's processes look like from outside: titles, command lines, settings that a command line can hold.

The same for every release from 0.5.9 to 0.5.23, so nothing here is keyed by release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from sgdiag.model import RankId, Role
from sgdiag.releases import arguments
from sgdiag.releases.secrets import redact_variables

TITLES: Mapping[str, Role] = MappingProxyType(
    {
        "sglang::scheduler": "scheduler",
        "sglang::detokenizer": "detokenizer",
        "sglang::detokenizer_router": "detokenizer-router",
        "sglang::data_parallel_controller": "dp-controller",
        "sglang::tokenizer_worker": "tokenizer-worker",
    }
)
"""Titles without what follows them: a scheduler's place (``_DP0_TP1``), a tokenizer worker's ``:<pid>``."""

WORKER_ROLES: frozenset[Role] = frozenset(TITLES.values())

LAUNCH_MODULES: Mapping[str, str] = MappingProxyType({"sglang.launch_server": "", "sglang.cli.main": "serve"})
"""Modules that start a server with ``python -m``, and the subcommand that they need for it."""

LAUNCH_SCRIPT, LAUNCH_SUBCOMMAND = "sglang", "serve"
LAUNCH_FILE = "sglang/launch_server.py"

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000

_SCHEDULER = re.compile(r"(?:_DP(\d+))?(?:_PP(\d+))?(?:_ATTN_CP\d+)?(?:_MOE_DP\d+)?(?:_TP(\d+))?(?:_EP\d+)?")
_COMM_LENGTH = 15


class Title(msgspec.Struct, frozen=True):
    """A process title understood. ``rank`` is None for all but schedulers, and for a place that is not understood."""

    role: Role
    rank: RankId | None = None


def parse_title(title: str) -> Title | None:
    """What an SGLang worker's exact title says; None for any other text."""
    if title.startswith("sglang::scheduler"):
        suffix = title.removeprefix("sglang::scheduler")
        if suffix and not re.match(r"_[A-Z]", suffix):
            return None
        place = _SCHEDULER.fullmatch(suffix)
        if place is None:
            return Title("scheduler")
        dp, pp, tp = (int(number[:9]) if number else 0 for number in place.groups())
        return Title("scheduler", RankId(dp=dp, pp=pp, tp=tp))
    if re.fullmatch(r"sglang::tokenizer_worker:\d+", title):
        return Title("tokenizer-worker")
    role = TITLES.get(title)
    return None if role is None or role == "tokenizer-worker" else Title(role)


def role_of_comm(comm: str) -> Role | None:
    """The role behind the kernel's name of a process, which keeps 15 characters of the title.

    It is all that is left of a process that has ended (a zombie). The detokenizer's router cannot be told from a
    detokenizer by it.
    """
    for title, role in TITLES.items():
        if comm == title[:_COMM_LENGTH]:
            return role
    return None


class Launch(msgspec.Struct, frozen=True):
    """A launcher's command line; ``args`` are what SGLang parses of it."""

    args: tuple[str, ...]


_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*[a-z]?")
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


class PythonCommand(msgspec.Struct, frozen=True):
    """A Python interpreter's command line taken apart: ``-m module``, ``-c code``, a script, or neither."""

    kind: Literal["module", "code", "script", "none"]
    what: str
    args: tuple[str, ...]


def parse_python(argv: Sequence[str]) -> PythonCommand | None:
    """How ``argv`` runs Python; None where its first word is no Python interpreter."""
    if not argv or not _PYTHON.fullmatch(argv[0].rsplit("/", 1)[-1]):
        return None
    position = 1
    while position < len(argv):
        word = argv[position]
        if not word.startswith("-") or word == "-":
            return PythonCommand("script", word, tuple(argv[position + 1 :]))
        if word in _OPTIONS_WITH_VALUE:
            position += 2
            continue
        # Short options stand together (-um module) and may carry their value (-mmodule).
        joined = re.match(r"-[A-Za-ln-z]*?([mc])(.*)", word, re.DOTALL) if not word.startswith("--") else None
        if joined and not word.startswith(("-W", "-X")):
            rest = argv[position + 1 :]
            what = joined[2] or (rest[0] if rest else "")
            args = rest if joined[2] else rest[1:]
            return PythonCommand("module" if joined[1] == "m" else "code", what, tuple(args))
        position += 1
    return PythonCommand("none", "", ())


def parse_launch(argv: Sequence[str]) -> Launch | None:
    """The launcher in ``argv``, told by the structure of the command line; None for anything else."""
    if argv and argv[0].rsplit("/", 1)[-1] == LAUNCH_SCRIPT:
        return _serve(argv[1:], LAUNCH_SUBCOMMAND)
    command = parse_python(argv)
    if command is None:
        return None
    if command.kind == "module" and command.what in LAUNCH_MODULES:
        return _serve(command.args, LAUNCH_MODULES[command.what])
    if command.kind == "script":
        if command.what.rsplit("/", 1)[-1] == LAUNCH_SCRIPT:
            return _serve(command.args, LAUNCH_SUBCOMMAND)
        if command.what == LAUNCH_FILE or command.what.endswith("/" + LAUNCH_FILE):
            return Launch(command.args)
    return None


def _serve(args: Sequence[str], subcommand: str) -> Launch | None:
    if not subcommand:
        return Launch(tuple(args))
    if not args or args[0] != subcommand:
        return None
    rest = tuple(args[1:])
    if rest and not rest[0].startswith("-"):
        rest = ("--model-path", *rest)
    return Launch(rest)


def is_resource_tracker(argv: Sequence[str]) -> bool:
    """Whether ``argv`` is multiprocessing's resource tracker, which starts with the environment of its parent then."""
    command = parse_python(argv)
    return (
        command is not None
        and command.kind == "code"
        and command.what.startswith("from multiprocessing.resource_tracker import main")
    )


_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        **arguments.FLAGS,
        "--model-path": "model_path",
        "--model": "model_path",
        "--served-model-name": "served_model_name",
        "--host": "host",
        "--port": "port",
        "--device": "device",
        "--tp-size": "tp_size",
        "--tensor-parallel-size": "tp_size",
        "--dp-size": "dp_size",
        "--data-parallel-size": "dp_size",
        "--attn-dp-size": "attn_dp_size",
        "--attention-data-parallel-size": "attn_dp_size",
        "--pp-size": "pp_size",
        "--pipeline-parallel-size": "pp_size",
        "--ep-size": "ep_size",
        "--expert-parallel-size": "ep_size",
        "--ep": "ep_size",
        "--nnodes": "nnodes",
        "--node-rank": "node_rank",
        "--context-length": "context_length",
        "--max-prefill-tokens": "max_prefill_tokens",
        "--ssl-certfile": "ssl_certfile",
        "--config": "config",
    }
)
_SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        **arguments.SWITCHES,
        "--enable-dp-attention": "enable_dp_attention",
    }
)


def settings(args: Sequence[str]) -> dict[str, str]:
    """Settings that SGLang's arguments ``args`` give, by field name, as text; switches are ``true``.

    The last of several wins, as with SGLang. An abbreviation is taken for the flag that it begins: one that could
    mean two would have been refused by the server.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(args):
        flag, equals, value = args[position].partition("=")
        position += 1
        if switch := _lookup(flag, _SWITCHES, abbreviated=False):
            found[switch] = "true"
        elif name := _lookup(flag, _FLAGS, abbreviated=True):
            if not equals and position < len(args):
                value = args[position]
                position += 1
            found[name] = value
    return found


def _lookup(flag: str, table: Mapping[str, str], *, abbreviated: bool) -> str | None:
    if flag in table or not abbreviated:
        return table.get(flag)
    if len(flag) < len("--tp") or not flag.startswith("--"):
        return None
    meant = {field for known, field in table.items() if known.startswith(flag)}
    return meant.pop() if len(meant) == 1 else None


ENVIRONMENT_PREFIXES = ("NCCL_", "SGLANG_", "CUDA_", "TORCH_", "OMP_")
ENVIRONMENT_NAMES = frozenset(
    {
        "GLOO_SOCKET_IFNAME",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "HIP_VISIBLE_DEVICES",
        "LD_PRELOAD",
        "NVIDIA_VISIBLE_DEVICES",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "ROCR_VISIBLE_DEVICES",
        "TRANSFORMERS_OFFLINE",
    }
)


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to a server's health, without secrets."""
    return redact_variables(
        {
            name: value
            for name, value in sorted(environment.items())
            if name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES
        }
    )


def local_ranks(
    *, tp_size: int, pp_size: int, nnodes: int, node_rank: int
) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
    """(pp, tp) places that run on host ``node_rank``, and those on the other hosts.

    Hosts first divide the pipeline stages; only when there are more hosts than stages do several share one stage's
    tensor-parallel ranks.
    """
    stages = max(pp_size // nnodes, 1)
    hosts_per_stage = max(nnodes // pp_size, 1)
    ranks = tp_size // hosts_per_stage
    first_pp, first_tp = stages * (node_rank // hosts_per_stage), ranks * (node_rank % hosts_per_stage)
    everywhere = frozenset((pp, tp) for pp in range(pp_size) for tp in range(tp_size))
    here = frozenset((pp, tp) for pp, tp in everywhere if 0 <= pp - first_pp < stages and 0 <= tp - first_tp < ranks)
    return here, everywhere - here
