"""Where names of machines and people stand in what SGLang, NCCL, torch and the system print."""

from __future__ import annotations

import functools
import ipaddress
import re
import typing
from collections.abc import Iterator

import msgspec

from sgdiag.model import Snapshot
from sgdiag.releases import arguments
from sgdiag.releases.redaction.standins import is_ours, is_stand_in

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}[A-Za-z0-9])?"
_HOST = rf"({_LABEL}(?:\.{_LABEL}){{0,10}})"
_LOGIN = r"([A-Za-z_][\w.-]{1,63})"
_IS = r"""["']?\s{0,2}[=:]\s{0,2}["']?"""

_DOMAIN = r"(?:com|net|org|edu|gov|mil|internal|localdomain|lan|corp|intranet|intra|cloud|svc|cluster\.local)"
"""Last parts of a name that no Python module or file is likely to have."""

HOST_PLACES = (
    re.compile(rf"://(?:[^\s/@'\"]{{1,256}}@)?{_HOST}(?![\w.-]*@)"),
    re.compile(rf"(?<![\w.-]){_HOST}(?=:\d{{1,10}}:\d{{1,10}} \[[\w-]{{0,8}}\] )"),
    re.compile(rf"\[{_HOST}(?=\]:\d{{2,5}}\b)"),
    re.compile(
        r"(?i:(?<![a-z])(?:host|host_?name|server_?name|node_?name|[\w-]{0,30}(?:init|master|bind|server|host)"
        rf"[_-]addr(?:ess)?|nodelist|hostid|comm_id)){_IS}(?:\w{{1,8}}://)?{_HOST}(?![\w(/])"
    ),
    re.compile(rf"--[\w-]{{0,40}}(?:host|addr|node|ip)[ =]{_HOST}(?![\w/])"),
    re.compile(
        rf"(?i:\b(?:to|from|on|resolve) host(?:name)?|\bconnect to(?! host))[ :]{{1,2}}[\"']?"
        # Words of a sentence may follow, too: "from host to device".
        rf"(?=[A-Za-z.]*[\d-]|[A-Za-z]+\.[A-Za-z]){_HOST}(?![\w/])"
    ),
    re.compile(rf"[\w.+-]@({_LABEL}(?:\.{_LABEL}){{1,10}})(?![\w-])"),
    re.compile(rf"(?i:(?<![\w.@/-])({_LABEL}(?:\.{_LABEL}){{0,8}}\.{_DOMAIN}))(?![\w-]|\.\w)"),
    re.compile(r"(?<![\w.-])(ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[\w-]{1,63}){0,8})(?![\w-])"),
)
"""What stands in the first group is a host: of an address, before NCCL's process and thread, in torch's sockets, …"""

USER_PLACES = (
    re.compile(r"/(?:home|homes|Users|users)/([^\s/'\":;,()\[\]{}<>|*?\\]{1,64})"),
    re.compile(rf"(?<![\w/.])~{_LOGIN}(?=/)"),
    re.compile(rf"://{_LOGIN}@"),
    re.compile(
        r"(?i:(?<![a-z])(?:user|username|user_name|logname|login))"
        rf"(?:[\"']?\s?=\s?[\"']?|[\"']\s?:\s?[\"']){_LOGIN}(?![\w(/])"
    ),
    re.compile(rf"(?<![\w.+/-])([\w.+-]{{1,64}})(?=@{_LABEL}(?:\.{_LABEL}){{1,10}}(?![\w-]))"),
)
"""What stands in the first group is a login, or the part of a mail address before the @."""

_PUBLIC = frozenset(
    {"huggingface.co", "hf.co", "github.com", "githubusercontent.com", "modelscope.cn", "nvidia.com", "pytorch.org"}
    | {"sglang.ai", "sglang.io", "python.org", "readthedocs.io", "pydantic.dev", "ray.io"}
)
"""Sites that everybody's messages name: where models, documentation and source come from."""

_ORDINARY = frozenset(
    re.findall(
        r"\S+",
        """
        localhost localdomain none null unknown true false default auto local remote server servers client hosts
        hostname nodes master worker workers head main leader follower scheduler detokenizer tokenizer launcher
        launch router decode prefill target draft model models sglang nccl cuda torch python docker container
        root admin administrator user users ubuntu debian centos rocky fedora ec2-user azureuser nobody daemon
        guest share shared common public data home homes work workspace project projects scratch test tests
        demo runner jovyan vscode app apps service services system info warning error debug idle socket http
        https grpc metrics health request response connection interface network device devices memory cache
        process processes thread threads kernel attention expert experts
        """,
    )
)
"""Words that say nothing of their owner, and that mean something else wherever they stand alone."""

_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
_IPV6 = re.compile(
    r"(?<![\w:.])(?=(?:[0-9a-fA-F]{4}:|(?:[0-9a-fA-F]{1,4}:){7}|::[fF]{4}:))[0-9a-fA-F:]{4,39}(?:\.\d{1,3}){0,3}(?![\w:])"
)
"""The first group of a real address has four digits; two of fewer in C++ text are a name in a namespace."""

_AFTER_VERSION = re.compile(r"(?:[=<>~!]=\s?|version[ :=]{0,3}|\bv)\Z", re.IGNORECASE)
MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
DEVICE = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")

HOST_SETTINGS = re.compile(
    r"host|addr|node_?list|node_?name|endpoint|comm_id|(?:^|_)(?:ip|url)s?(?:_|$)", re.IGNORECASE
)
"""Arguments and variables whose value names a host."""


def addresses(text: str) -> Iterator[tuple[int, int, Address]]:
    """Where in ``text`` addresses of machines stand: not those that every machine has, nor version numbers."""
    for pattern in (_IPV4, _IPV6):
        for found in pattern.finditer(text):
            try:
                address = ipaddress.ip_address(found[0])
            except ValueError:
                continue
            if not _is_everywhere(address) and not _AFTER_VERSION.search(
                text, max(found.start() - 12, 0), found.start()
            ):
                yield found.start(), found.end(), address


def hosts_of_setting(value: str) -> Iterator[str]:
    """The hosts that a setting names: ``gpu-7:5000``, ``tcp://gpu-7:5000``, ``gpu-7,gpu-8``."""
    for word in re.split(r"[\s,;]+", value):
        found = re.fullmatch(rf"(?:\w{{1,10}}://)?{_HOST}(?::\d{{1,5}})?(?:/\S*)?", word)
        if found is not None:
            yield found[1]


def _is_everywhere(address: Address) -> bool:
    return (
        address.is_loopback
        or address.is_unspecified
        or address.is_multicast
        or is_ours(address)
        or (address.version == 4 and (address.is_link_local or str(address).startswith("255.")))
    )


def is_host(name: str) -> bool:
    """Whether a name that stands where a host is named tells which one."""
    lower = name.lower()
    return (
        any(char.isalpha() for char in name)
        and not re.fullmatch(r"0x[0-9a-f]+|(?:rank|tp|dp|pp|ep|cuda|cpu|numa)\d+", lower)
        and lower not in _ORDINARY
        and ".".join(lower.rsplit(".", 2)[-2:]) not in _PUBLIC
        and not is_stand_in(name)
    )


def is_user(name: str) -> bool:
    """Whether a name that stands where a login is named tells whose."""
    return name.lower() not in _ORDINARY and not is_stand_in(name)


def is_distinct(name: str) -> bool:
    """Whether a name can be taken for itself wherever it stands: no short word, and none of SGLang's own."""
    return name.lower() not in _ordinary_words() and (len(name) >= 5 or (len(name) >= 3 and not name.isalpha()))


@functools.cache
def _ordinary_words() -> frozenset[str]:
    """Also the words that the model and SGLang's arguments are made of, without which nothing could be diagnosed."""
    names = {word for kind in model_types() for word in kind.__struct_fields__} | closed_words()
    names |= {flag.lstrip("-") for flag in (*arguments.FLAGS, *arguments.SWITCHES)}
    return (
        _ORDINARY | {word.lower() for name in names for word in re.split(r"[-_ ]", name)} | {n.lower() for n in names}
    )


@functools.cache
def model_types() -> tuple[type[msgspec.Struct], ...]:
    """Every struct that a snapshot is made of."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(kind: object) -> None:
        origin = typing.get_origin(kind) or kind
        if isinstance(origin, type) and issubclass(origin, msgspec.Struct) and origin not in found:
            found[origin] = None
            for hint in typing.get_type_hints(origin).values():
                visit(hint)
        for argument in typing.get_args(kind):
            visit(argument)

    visit(Snapshot)
    return tuple(found)


@functools.cache
def closed_words() -> frozenset[str]:
    """Every word of the model's closed vocabularies, such as the roles of processes."""
    words: set[str] = set()

    def visit(kind: object) -> None:
        if typing.get_origin(kind) is typing.Literal:
            words.update(word for word in typing.get_args(kind) if isinstance(word, str))
        for argument in typing.get_args(kind):
            visit(argument)

    for struct in model_types():
        for hint in typing.get_type_hints(struct).values():
            visit(hint)
    return frozenset(words)
