"""What each rule answers as a whole: how bad, how sure, and the commands that it gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from sgdiag.model import (
    Batch,
    Collectives,
    Communicator,
    Disagreement,
    Finding,
    Gpu,
    GpuProcess,
    Gpus,
    GraphSet,
    Known,
    KvPool,
    Log,
    LogLine,
    NcclCommunicator,
    NcclRank,
    NcclRas,
    Process,
    Rank,
    RankId,
    Server,
    Snapshot,
    Speculation,
    unknown,
)
from sgdiag.rules import evaluate

GIB = 1 << 30
AT = 100.0


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def read(value: Any) -> Known[Any]:
    """A fact of one consistent read."""
    return Known(value, "object:Scheduler", at=AT)


def find(snapshot: Snapshot, finding_id: str) -> Finding | None:
    return next((finding for finding in evaluate(snapshot) if finding.id == finding_id), None)


def one_rank(**fields: Any) -> tuple[Rank, ...]:
    return (Rank(id=RankId(), **fields),)


def pool(available: int) -> tuple[Rank, ...]:
    """A pool of 1,000 slots whose rank has nothing to do; ``available`` of them are free."""
    return one_rank(
        request_slots=known(8),
        free_request_slots=read(8),
        batches=(Batch(name="running", requests=read(0)),),
        kv=KvPool(
            pool_type=known("MHATokenToKVPool"),
            capacity_tokens=known(1000),
            available_tokens=read(available),
            evictable_tokens=read(0),
            protected_tokens=read(0),
        ),
    )


def verifying(slots: int, tokens: int) -> tuple[Rank, ...]:
    """Two requests whose drafts are verified: ``tokens`` of them, in ``slots`` slots."""
    batch = Batch(
        name="running",
        mode=read("TARGET_VERIFY"),
        requests=read(2),
        out_cache_loc_shape=read((slots,)),
        spec_info_type=read("EagleVerifyInput"),
        spec_info_shapes=read({"draft_token": (tokens,), "retrieve_index": (tokens // 4, 4)}),
    )
    return one_rank(batches=(batch,))


def ras(**rank: Any) -> Collectives:
    """What NCCL says of two ranks, of which the second is as told."""
    other = {"rank": 1, "pid": 71, "counts": {"AllReduce": 5}, "unchanged_s": 60.0, **rank}
    ranks = (NcclRank(rank=0, pid=70, counts={"AllReduce": 5}), NcclRank(**other))
    communicator = NcclCommunicator(id="0xa", size_ranks=2, ranks=ranks, most={"AllReduce": 5})
    return Collectives(ras=Known(NcclRas(version="2.28", communicators=(communicator,)), "ncclras"))


CUDA = {"device": known("cuda")}
DRAFTS = Speculation(
    algorithm=known("EAGLE3"), worker=known("EAGLEWorkerV2"), steps=known(5), topk=known(1), draft_tokens=known(16)
)
SLOW_DRAFTS = {"running_requests": known(24), "decode_tokens_per_s": known(2000.0)}
BUSY_GPU = Gpu(
    index=0, memory_used_bytes=known(60 * GIB), processes=known((GpuProcess(pid=9, memory_bytes=known(GIB)),))
)


class Case(NamedTuple):
    finding_id: str
    snapshot: Snapshot
    verdict: str
    confidence: float
    commands: tuple[str, ...]


CASES = {
    "slots that nobody holds": Case(
        "kv-slots-unaccounted",
        Snapshot(ranks=pool(940)),
        "WARN",
        0.8,
        ("sgdiag status --watch", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY=1", ""),
    ),
    "slots that were freed twice": Case(
        "kv-slots-unaccounted",
        Snapshot(ranks=pool(1064)),
        "FAIL",
        0.9,
        ("sgdiag status --watch", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY=1", ""),
    ),
    "two arguments that were changed": Case(
        "server-argument-changed",
        Snapshot(
            server=Server(
                asked=known({"page_size": "1", "attention_backend": "fa3"}),
                args=known({"page_size": 64, "attention_backend": "triton"}),
            )
        ),
        "WARN",
        0.9,
        ("sgdiag attach", "--attention-backend --page-size"),
    ),
    "a speculative input of another batch": Case(
        "spec-info-width-mismatch",
        Snapshot(ranks=verifying(40, 40), speculation=DRAFTS),
        "FAIL",
        0.9,
        ("sgdiag attach", "", ""),
    ),
    "too few slots": Case(
        "out-cache-loc-mismatch",
        Snapshot(ranks=verifying(7, 8), speculation=DRAFTS),
        "FAIL",
        0.9,
        ("sgdiag attach", "", ""),
    ),
    "graphs that are off": Case(
        "decode-without-graph",
        Snapshot(server=Server(args=known({"disable_decode_cuda_graph": True}))),
        "WARN",
        1.0,
        ("--disable-decode-cuda-graph",),
    ),
    "a batch that no graph fits": Case(
        "decode-without-graph",
        Snapshot(
            server=Server(**CUDA),
            ranks=one_rank(running_requests=known(1), decode_uses_graph=known(False)),
            graphs=(GraphSet(name="target decode", sizes=known((1, 2))),),
        ),
        "WARN",
        0.6,
        ("sgdiag attach",),
    ),
    "a batch above the graphs": Case(
        "decode-without-graph",
        Snapshot(
            server=Server(release=known("0.5.14"), **CUDA),
            ranks=one_rank(running_requests=known(3), decode_uses_graph=known(False)),
            graphs=(GraphSet(name="target decode", sizes=known((1, 2))),),
        ),
        "WARN",
        0.9,
        ("--cuda-graph-max-bs-decode 3",),
    ),
    "a padded batch": Case(
        "graph-padding-high",
        Snapshot(
            server=Server(release=known("0.5.13.post1"), **CUDA),
            ranks=one_rank(running_requests=known(48)),
            graphs=(GraphSet(name="target decode", sizes=known((1, 64))),),
        ),
        "WARN",
        0.5,
        ("--cuda-graph-bs 1 48 64",),
    ),
    "graphs of another width": Case(
        "graph-width-mismatch",
        Snapshot(
            server=Server(**CUDA),
            speculation=Speculation(algorithm=known("EAGLE3"), draft_tokens=known(6)),
            graphs=(GraphSet(name="target verify", tokens_per_request=known(4)),),
        ),
        "FAIL",
        0.85,
        ("--speculative-num-draft-tokens 6", "--speculative-adaptive (0.5.11 and newer)"),
    ),
    "a full pool of unknown load": Case(
        "kv-pool-exhausted",
        Snapshot(ranks=one_rank(kv=KvPool(usage_ratio=known(0.95), dtype=known("torch.float16")))),
        "WARN",
        1.0,
        (
            "--max-running-requests LOWER",
            "sgdiag kv",
            "--kv-cache-dtype fp8_e4m3",
            "--schedule-conservativeness 1.3",
        ),
    ),
    "a limit that the pool set": Case(
        "running-limit-reached",
        Snapshot(
            server=Server(asked=known({"max_running_requests": "9"})),
            ranks=one_rank(running_requests=known(8), max_running_requests=known(8), waiting_requests=known(1)),
        ),
        "WARN",
        1.0,
        ("sgdiag kv",),
    ),
    "a limit of which no more is known": Case(
        "running-limit-reached",
        Snapshot(ranks=one_rank(running_requests=known(8), max_running_requests=known(8), waiting_requests=known(1))),
        "WARN",
        1.0,
        ("--max-running-requests HIGHER",),
    ),
    "a rank that is dead to NCCL": Case(
        "nccl-rank-missing",
        Snapshot(collectives=ras(state="dead")),
        "FAIL",
        0.9,
        ("sgdiag processes", "sgdiag stacks", ""),
    ),
    "a rank that does not answer NCCL": Case(
        "nccl-rank-missing",
        Snapshot(collectives=ras(state="unresponsive")),
        "FAIL",
        0.85,
        ("sgdiag processes", "sgdiag stacks", ""),
    ),
    "a rank that left a communicator": Case(
        "nccl-rank-missing",
        Snapshot(collectives=ras(state="absent")),
        "WARN",
        0.6,
        ("sgdiag processes", "sgdiag stacks"),
    ),
    "a rank that launched less": Case(
        "nccl-rank-lagging", Snapshot(collectives=ras(counts={"AllReduce": 4})), "FAIL", 0.85, ("sgdiag stacks",)
    ),
    "a rank that launched less, a while ago": Case(
        "nccl-rank-lagging",
        Snapshot(collectives=ras(counts={"AllReduce": 4}, unchanged_s=29.0)),
        "WARN",
        0.7,
        ("sgdiag stacks",),
    ),
    "processes without a launcher": Case(
        "orphaned-scheduler",
        Snapshot(processes=(Process(pid=41, orphan=known(True)), Process(pid=43, orphan=known(True)))),
        "FAIL",
        1.0,
        ("sgdiag processes --reap", "kill 41 43"),
    ),
    "a neighbour on the GPU": Case(
        "gpu-memory-held-by-others",
        Snapshot(processes=(Process(pid=8),), gpus=Gpus(devices=(BUSY_GPU,))),
        "WARN",
        0.9,
        ("sgdiag processes",),
    ),
    "memory that no process is named for": Case(
        "gpu-memory-without-process",
        Snapshot(gpus=Gpus(devices=(BUSY_GPU,))),
        "WARN",
        0.85,
        ("nvidia-smi; sgdiag processes", "dmesg | grep -i xid"),
    ),
    "a server that starts": Case(
        "server-not-serving", Snapshot(server=Server(health=known("starting"))), "WARN", 1.0, ("sgdiag attach",)
    ),
    "a server that is gone": Case(
        "server-not-serving",
        Snapshot(server=Server(health=known("down"))),
        "FAIL",
        1.0,
        ("sgdiag attach", "sgdiag processes"),
    ),
    "a server that does not answer": Case(
        "server-not-serving",
        Snapshot(server=Server(health=known("unresponsive"))),
        "FAIL",
        1.0,
        ("sgdiag stacks", "sgdiag attach", "sgdiag processes"),
    ),
    "sources that disagree": Case(
        "sources-disagree",
        Snapshot(disagreements=(Disagreement("server.release", "0.5.20", "procfs", "0.5.23", "server_info"),)),
        "WARN",
        1.0,
        ("sgdiag doctor",),
    ),
    "a torch that does not know the GPU": Case(
        "torch-not-built-for-gpu",
        Snapshot(
            server=Server(torch_cuda=known("12.4")),
            gpus=Gpus(devices=(Gpu(index=0, compute_capability=known("12.0")),)),
        ),
        "FAIL",
        0.9,
        ("",),
    ),
    "a driver of an older major version": Case(
        "driver-older-than-torch",
        Snapshot(server=Server(torch_cuda=known("13.0")), gpus=Gpus(driver_cuda=known("12.9"))),
        "FAIL",
        0.7,
        ("nvidia-smi",),
    ),
    "a driver of an older minor version": Case(
        "driver-older-than-torch",
        Snapshot(server=Server(torch_cuda=known("12.9")), gpus=Gpus(driver_cuda=known("12.8"))),
        "WARN",
        0.5,
        ("nvidia-smi",),
    ),
    "a compiler of another major version": Case(
        "cuda-toolkit-unfit",
        Snapshot(server=Server(torch_cuda=known("13.0"), cuda_toolkit=known("12.9"))),
        "WARN",
        0.8,
        ("CUDA_HOME=/usr/local/cuda-13.0",),
    ),
    "two packages of other versions": Case(
        "packages-unlike-release",
        Snapshot(
            server=Server(
                packages=known({"sgl-kernel": "0.3.1", "torch": "2.9.0+cu129"}),
                pinned=known({"torch": "2.9.1+cu128", "sgl-kernel": "0.3.2"}),
            )
        ),
        "WARN",
        0.8,
        ("pip install sgl-kernel==0.3.2 torch==2.9.1+cu128",),
    ),
    "drafts that are seldom right": Case(
        "spec-acceptance-low",
        Snapshot(ranks=one_rank(accept_length_tokens=known(2.5)), speculation=DRAFTS),
        "WARN",
        0.8,
        ("--speculative-draft-model-path", "--speculative-num-steps 2 --speculative-num-draft-tokens 3"),
    ),
    "drafts that are never right": Case(
        "spec-break-even",
        Snapshot(ranks=one_rank(accept_length_tokens=known(1.02), **SLOW_DRAFTS), speculation=DRAFTS),
        "WARN",
        0.9,
        ("sgdiag playbook spec-acceptance-low", "drop --speculative-algorithm"),
    ),
    "drafts that may cost more than they give": Case(
        "spec-break-even",
        Snapshot(
            server=Server(release=known("0.5.14")),
            ranks=one_rank(accept_length_tokens=known(2.5), **SLOW_DRAFTS),
            speculation=DRAFTS,
        ),
        "UNKNOWN",
        0.0,
        (
            "drop --speculative-algorithm",
            "sgdiag apply-fix dynamic-speculation-disable",
            "--speculative-adaptive --speculative-adaptive-config FILE",
        ),
    ),
    "speculation that was dropped": Case(
        "spec-requested-but-off",
        Snapshot(
            server=Server(asked=known({"speculative_algorithm": "EAGLE3"})),
            speculation=Speculation(algorithm=known("none")),
        ),
        "WARN",
        1.0,
        ("sgdiag attach",),
    ),
    "memory that custom allreduce cannot share": Case(
        "expandable-segments-custom-allreduce",
        Snapshot(
            server=Server(tp_size=known(2)),
            collectives=Collectives(environment=known({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})),
        ),
        "WARN",
        0.7,
        ("unset PYTORCH_CUDA_ALLOC_CONF", "--disable-custom-all-reduce"),
    ),
    "variables that NCCL and Gloo cannot follow": Case(
        "nccl-environment-wrong",
        Snapshot(
            collectives=Collectives(
                environment=known(
                    {
                        "NCCL_P2P_DISABLE": "1",
                        "NCCL_P2P_LEVEL": "NODE",
                        "NCCL_MAX_NCHANNELS": "0",
                        "NCCL_LL_BUFFSIZE": "0",
                        "NCCL_NVLS_ENABLE": "1",
                        "NCCL_SOCKET_IFNAME": "ib0",
                        "GLOO_SOCKET_IFNAME": "^lo",
                    }
                ),
                interfaces=known(("lo", "docker0", "veth1", "br-2", "ens5")),
                communicators=(Communicator(group="tp", custom_allreduce=known("on")),),
            ),
            gpus=Gpus(devices=(Gpu(index=0, nvlinks_up=known(0)),)),
        ),
        "WARN",
        0.85,
        (
            "NCCL_P2P_LEVEL=SYS",
            "unset NCCL_LL_BUFFSIZE",
            "unset NCCL_MAX_NCHANNELS",
            "GLOO_SOCKET_IFNAME=ens5",
            "NCCL_SOCKET_IFNAME=ens5",
            "--disable-custom-all-reduce",
            "unset NCCL_NVLS_ENABLE",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer(case: str) -> None:
    expected = CASES[case]
    finding = find(expected.snapshot, expected.finding_id)
    assert finding is not None
    commands = tuple(advice.command for advice in finding.advice)
    assert (finding.verdict, finding.confidence, commands) == (expected.verdict, expected.confidence, expected.commands)


SAID = {
    "slots that nobody holds": ("token slots are lost", "slots that nobody holds"),
    "slots that were freed twice": ("token slots were freed twice", "slots that are free and still in use"),
    "a batch above the graphs": ("decode steps run without a CUDA graph", "the running batch is larger than"),
    "a full pool of unknown load": ("the KV pool is nearly full", "the running requests need more"),
    "a server that is gone": ("the server is gone", "its processes ended"),
    "a rank that left a communicator": ("a rank is no member", "it answers and has left"),
    "a rank that launched less": ("rank 1: the others wait", "a collective ends when"),
}


@pytest.mark.parametrize("case", SAID)
def test_title_and_cause_are_those_of_the_case(case: str) -> None:
    finding = find(CASES[case].snapshot, CASES[case].finding_id)
    assert finding is not None
    title, cause = SAID[case]
    assert finding.title.startswith(title)
    assert finding.cause.startswith(cause)


def test_what_is_not_known_is_no_evidence() -> None:
    """The honest answers of rules whose question arises on any server."""
    for finding in evaluate(Snapshot()):
        assert (finding.verdict, finding.confidence, finding.advice) == ("UNKNOWN", 0.0, ())
        assert finding.cause.startswith("needs ")
    steps = find(Snapshot(speculation=Speculation(algorithm=known("EAGLE"))), "spec-acceptance-low")
    assert steps is not None
    assert steps.title.startswith("cannot tell whether drafts are accepted")
    assert "the number of draft steps" in steps.cause
    health = find(Snapshot(server=Server(health=unknown("no answer"))), "server-not-serving")
    assert health is not None
    assert [(item.source, item.text) for item in health.evidence] == [("unknown", "no answer")]


def test_a_dead_server_quotes_its_last_three_errors() -> None:
    lines = tuple(LogLine(number, f"error {number}", "TP0", "error") for number in (1, 2, 3, 4))
    finding = find(Snapshot(server=Server(health=known("down")), log=Log(errors=lines)), "server-not-serving")
    assert finding is not None
    assert [item.text for item in finding.evidence] == ["health is down", "error 2", "error 3", "error 4"]


def test_findings_of_one_verdict_come_the_surest_first() -> None:
    """A limit that is reached is sure, graphs that did not fit are less so."""
    rank = Rank(
        id=RankId(),
        running_requests=known(1),
        max_running_requests=known(1),
        waiting_requests=known(1),
        decode_uses_graph=known(False),
    )
    warnings = [finding.id for finding in evaluate(Snapshot(ranks=(rank,))) if finding.verdict == "WARN"]
    assert warnings == ["running-limit-reached", "decode-without-graph"]
