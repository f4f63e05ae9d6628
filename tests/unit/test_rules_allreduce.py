"""Why custom allreduce is off, and what is advised: by what SGLang said, else by the facts that it looks at itself."""

from __future__ import annotations

from typing import Any

import pytest

from sgdiag.model import (
    AllreduceBench,
    Collectives,
    Communicator,
    Finding,
    Gpu,
    Gpus,
    Known,
    Server,
    Snapshot,
    Unknown,
    unknown,
)
from sgdiag.rules import evaluate


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def find(snapshot: Snapshot) -> Finding | None:
    return next((finding for finding in evaluate(snapshot) if finding.id == "custom-allreduce-off"), None)


PCIE_WORDS = "it's not supported on more than two PCIe-only GPUs"


def off(said: str = "disabled", **facts: Any) -> Finding:
    """What is said of a server whose custom allreduce is off with these words; facts that are not given are unknown."""

    def told(name: str) -> Known[Any] | Unknown:
        return known(facts[name]) if name in facts else unknown("not told")

    tp = facts.get("tp", 2)
    ranks = facts.get("ranks", tp)
    links = facts["links"] if isinstance(facts.get("links"), tuple) else (facts.get("links"),) * tp
    gpus = tuple(
        Gpu(
            index=index,
            uuid=known(f"GPU-{index}"),
            nvlinks_up=unknown("no driver") if links[index] is None else known(links[index]),
            peers=told("peers"),
        )
        for index in range(tp)
    )
    group = Communicator(
        group="tp",
        size_ranks=unknown("not read") if ranks is None else known(ranks),
        custom_allreduce=known(said),
        sgdiag_pcie=told("sgdiag_pcie"),
    )
    server = Server(
        tp_size=known(tp),
        pp_size=told("pp"),
        nnodes=told("nnodes"),
        release=told("release"),
        args=told("args"),
        asked=told("asked"),
    )
    collectives = Collectives(environment=told("environment"), benches=told("benches"), communicators=(group,))
    finding = find(Snapshot(server=server, gpus=Gpus(devices=gpus), collectives=collectives))
    assert finding is not None
    assert (finding.verdict, finding.family) == ("WARN", "custom-allreduce")
    assert finding.evidence[0].text == f"group tp: {said}"
    return finding


SWITCHED_OFF = {"disable_custom_all_reduce": True}
PCIE_IPC, V2_OFF = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0"
WARNING = "sgdiag attach"
P2P = ["nvidia-smi topo -p2p r", "iommu=pt"]


@pytest.mark.parametrize(
    ("facts", "cause", "confidence", "commands"),
    [
        # Switched off, by whom?
        ({"args": SWITCHED_OFF}, "--disable-custom-all-reduce is set", 0.95, ["--disable-custom-all-reduce"]),
        (
            {"said": "switched off by --disable-custom-all-reduce"},
            "--disable-custom-all-reduce is set",
            0.95,
            ["--disable-custom-all-reduce"],
        ),
        (
            {"args": SWITCHED_OFF, "asked": {"disable_custom_all_reduce": "true"}},
            "--disable-custom-all-reduce is set",
            0.95,
            ["--disable-custom-all-reduce"],
        ),
        (
            {"args": SWITCHED_OFF, "asked": {"config": "/etc/sglang.yaml"}},
            "--disable-custom-all-reduce is set",
            0.95,
            ["--disable-custom-all-reduce"],
        ),
        (
            {"args": SWITCHED_OFF, "asked": {}},
            "SGLang itself set --disable-custom-all-reduce",
            0.9,
            ["--enable-deterministic-inference"],
        ),
        # Groups that it does not serve.
        (
            {"said": "this process group spans across nodes"},
            "the group spans several hosts",
            0.9,
            ["--tp-size GPUS-PER-HOST --pp-size HOSTS"],
        ),
        ({"nnodes": 2}, "the group spans several hosts", 0.9, ["--tp-size GPUS-PER-HOST --pp-size HOSTS"]),
        ({"tp": 3}, "custom allreduce knows groups of 2, 4, 6, 8 ranks, not of 3", 0.95, []),
        ({"tp": 6}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        (
            {"said": "of an unsupported world size: 8. Supported world sizes: [2, 4]", "tp": 8},
            "custom allreduce knows groups of 2, 4, 6, 8 ranks, not of 8",
            0.95,
            [],
        ),
        (
            {"said": "setup failed: invalid argument"},
            "its set-up failed",
            0.8,
            ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
        ),
        # Two GPUs without NVLink: only 0.5.12 has no way for them.
        ({"links": 0, "release": "0.5.12.post1"}, "0.5.12 and its post releases", 0.9, [V2_OFF]),
        (
            {"said": "it wants NVLink", "release": "0.5.12"},
            "0.5.12 and its post releases",
            0.9,
            [V2_OFF],
        ),
        ({"links": 18, "release": "0.5.12"}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        ({"release": "0.5.12"}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        ({"links": (0, 18), "release": "0.5.12"}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        ({"links": 0, "release": "0.5.13"}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        ({"links": 0, "release": "0.5.11"}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        # More GPUs over PCIe, by the words and by the links.
        ({"said": PCIE_WORDS, "tp": 8, "release": "0.5.21"}, "custom allreduce wants NVLink", 0.95, [PCIE_IPC]),
        ({"said": "no nvlink", "tp": 4, "release": "0.5.22"}, "custom allreduce wants NVLink", 0.95, [PCIE_IPC]),
        ({"tp": 4, "links": 0, "release": "0.5.20"}, "custom allreduce wants NVLink", 0.95, [PCIE_IPC]),
        ({"tp": 4, "links": 18}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        ({"said": PCIE_WORDS, "tp": 6, "release": "0.5.22"}, "custom allreduce wants NVLink", 0.95, []),
        # P2P.
        ({"said": "your platform lacks GPU P2P capability or P2P test failed"}, "P2P between the GPUs", 0.9, P2P),
        ({"peers": {"1": "chipset not supported", "2": "ok"}}, "P2P between the GPUs", 0.7, P2P),
        ({"peers": {"1": "ok"}}, "SGLang wants NVLink between all GPUs", 0.5, [WARNING]),
        # An unknown size is that of all ranks.
        ({"tp": 3, "ranks": None}, "custom allreduce knows groups of 2, 4, 6, 8 ranks, not of 3", 0.95, []),
    ],
)
def test_why_it_is_off(facts: dict[str, Any], cause: str, confidence: float, commands: list[str]) -> None:
    finding = off(**facts)
    assert finding.cause.startswith(cause)
    assert finding.confidence == confidence
    assert [advice.command for advice in finding.advice] == commands


@pytest.mark.parametrize(
    ("facts", "spans"),
    [
        ({"tp": 8, "nnodes": 2}, True),
        ({"tp": 4, "nnodes": 2, "pp": 2}, False),
        ({"tp": 8, "nnodes": 4, "pp": 2}, True),
        # Attention groups of a server over two hosts, each within one of them.
        ({"tp": 8, "nnodes": 2, "ranks": 4}, False),
        ({"tp": 8, "nnodes": 2, "ranks": 8}, True),
        ({"tp": 8}, False),
    ],
)
def test_only_a_group_larger_than_a_host_spans_hosts(facts: dict[str, Any], spans: bool) -> None:
    assert ("spans several hosts" in off(**facts).cause) is spans


def test_the_reason_is_shown_with_what_it_stands_on() -> None:
    assert [item.text for item in off(links=0, release="0.5.12").evidence[1:]] == [
        "GPU 0: no NVLink is up",
        "GPU 1: no NVLink is up",
    ]
    assert [item.text for item in off(PCIE_WORDS, tp=4, links=18).evidence[1:]] == []
    refused = {"0": "ok", "1": "chipset not supported"}
    assert [item.text for item in off(peers=refused).evidence[1:]] == [
        "GPU 0 to GPU 1: P2P is chipset not supported",
        "GPU 1 to GPU 1: P2P is chipset not supported",
    ]
    assert [item.text for item in off(args=SWITCHED_OFF, asked={}).evidence[1:]] == [
        "--disable-custom-all-reduce was not given"
    ]


@pytest.mark.parametrize(
    ("facts", "action", "effect"),
    [
        ({"release": "0.5.20"}, "upgrade to 0.5.21 or newer", ""),
        ({"release": "0.5.21"}, "try FlashInfer's PCIe kernels", "shorter allreduces when decoding"),
        ({}, "on 0.5.21 or newer, try FlashInfer's PCIe kernels", "shorter allreduces when decoding"),
        (
            {"release": "0.5.21", "environment": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}},
            "PCIe kernels were asked for and do not run",
            "",
        ),
        (
            {"release": "0.5.21", "environment": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "0"}},
            "try FlashInfer's PCIe kernels",
            "shorter allreduces when decoding",
        ),
    ],
)
def test_flashinfers_kernels_are_advised_as_the_release_has_them(
    facts: dict[str, Any], action: str, effect: str
) -> None:
    finding = off(PCIE_WORDS, tp=4, **facts)
    assert finding.advice[-1].action.startswith(action)
    assert finding.advice[-1].effect == effect
    assert finding.advice[-1].command == (WARNING if "do not run" in action else PCIE_IPC)


GPUS = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        ({}, "sgdiag bench-allreduce"),
        (
            {"benches": (AllreduceBench(at=1.0, gpus=GPUS[:2], last_bytes=4096, saved_us=3.0),)},
            "sgdiag bench-allreduce",
        ),
        (
            {"benches": (AllreduceBench(at=1.0, gpus=GPUS, last_bytes=4096, saved_us=3.0),)},
            "SGLANG_SGDIAG_PCIE_ALLREDUCE=1",
        ),
        ({"environment": {"SGLANG_SGDIAG_PCIE_ALLREDUCE": "1"}}, "sgdiag fixes status"),
        ({"sgdiag_pcie": "no P2P"}, PCIE_IPC),
        ({"peers": {"9": "gpu not supported"}}, PCIE_IPC),
    ],
)
def test_sgdiags_own_kernels_are_advised_where_p2p_works(facts: dict[str, Any], command: str) -> None:
    finding = off(PCIE_WORDS, **{"tp": 4, "peers": {"9": "ok"}, "release": "0.5.21", **facts})
    assert finding.advice[0].command == command
    assert finding.confidence == 0.95


def test_a_gpu_whose_peers_are_not_known_is_no_gpu_with_p2p() -> None:
    assert [advice.command for advice in off(PCIE_WORDS, tp=4, release="0.5.21").advice] == [PCIE_IPC]


def communicator(group: str = "tp", custom: str = "disabled", **more: str) -> Communicator:
    return Communicator(
        group=group, custom_allreduce=known(custom), **{name: known(said) for name, said in more.items()}
    )


@pytest.mark.parametrize(
    ("groups", "server", "asked"),
    [
        ((communicator(),), {}, True),
        ((communicator(),), {"device": known("cuda")}, True),
        ((communicator(),), {"device": known("cpu")}, False),
        ((communicator(),), {"tp_size": known(1)}, False),
        ((communicator(),), {"tp_size": unknown("not told")}, False),
        ((communicator(custom="on"),), {}, False),
        # The world group of every server with several ranks wants none; that of tensor parallelism does.
        ((communicator("world", "not asked for"), communicator(custom="on")), {}, False),
        ((communicator("world", "not asked for"), communicator(custom="not asked for")), {}, True),
        # Other kernels reduce in its place.
        ((communicator(pcie_ipc="on"),), {}, False),
        ((communicator(sgdiag_pcie="on"),), {}, False),
        ((communicator(pcie_ipc="disabled", sgdiag_pcie="no P2P"),), {}, True),
        ((Communicator(group="tp", custom_allreduce=unknown("torn")),), {}, False),
    ],
)
def test_when_the_question_arises(groups: tuple[Communicator, ...], server: dict[str, Any], asked: bool) -> None:
    snapshot = Snapshot(server=Server(**{"tp_size": known(2), **server}), collectives=Collectives(communicators=groups))
    finding = find(snapshot)
    assert (finding is not None) is asked
    assert finding is None or len(finding.evidence) == 1
