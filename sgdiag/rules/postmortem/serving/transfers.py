"""What each kind of failed KV transfer means, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.model import Advice
from sgdiag.rules.postmortem.registry import Part

_OTHER_BACKEND = Advice(
    "try the other transfer backend on both sides; if that works, the network is fine",
    "--disaggregation-transfer-backend nixl (or mooncake)",
)
_DEVICE = Advice(
    "name the InfiniBand or RoCE devices instead of having them guessed", "--disaggregation-ib-device mlx5_0,mlx5_1"
)
_OTHER_SIDE = Advice(
    "read the other side's log of the same minute, and those of all its ranks", "sgdiag explain PREFILL.log DECODE.log"
)
_CLASS_MISLEADS = (
    "KVTransferError is what every failed transfer is called, aborts and time-outs too; the text after the colon counts"
)


class Case(NamedTuple):
    """What one sign stands for. Cases come in the order in which they tell more of the cause."""

    sign: str
    finding: str
    part: Part
    confidence: float
    title: str
    cause: str
    advice: tuple[Advice, ...]
    told: str = ""


TRANSPORT = (
    Case(
        "kv-memory-not-registered",
        "kv-memory-not-registered",
        "cause",
        0.9,
        "the transfer engine could not register the KV pool with the network card",
        "the NIC cannot reach GPU memory",
        (
            Advice(
                "load the module that lets the NIC reach GPU memory", "modprobe nvidia_peermem; lsmod | grep peermem"
            ),
            Advice(
                "lift the limit on locked memory",
                "ulimit -l unlimited (docker: --ulimit memlock=-1 --device /dev/infiniband)",
            ),
            _DEVICE,
            Advice("register less: some cards limit the size of a region", "--mem-fraction-static lower"),
        ),
        "the start-up goes on after it, and the first transfer fails with a text that does not mention it",
    ),
    Case(
        "kv-mismatch",
        "disaggregation-mismatch",
        "cause",
        0.9,
        "prefill and decode are not laid out alike",
        "page size, KV type, parallel sizes or release of the two sides differ in a way that this release cannot "
        "bridge",
        (
            Advice("start both sides with the same release, --page-size, --kv-cache-dtype and attention backend"),
            Advice("with hybrid models use the same tensor-parallel size on both sides", "--tp-size"),
        ),
        "right; clients may only see a request that never ends",
    ),
    Case(
        "kv-over-tcp",
        "kv-transfer-over-tcp",
        "cause",
        0.85,
        "KV transfers go over TCP, and fail there",
        "the transfer engine found no usable RDMA device and fell back to TCP, which reads GPU addresses as host "
        "memory "
        "or runs out of connections under load",
        (
            Advice("see which devices there are, here and in the container", "ibv_devices; ls /dev/infiniband"),
            _DEVICE,
            Advice(
                "without RDMA use the backend that copies through host memory properly",
                "--disaggregation-transfer-backend nixl",
            ),
        ),
        _CLASS_MISLEADS,
    ),
    Case(
        "nixl-failed",
        "nixl-failed",
        "cause",
        0.8,
        "the NIXL transfer backend failed",
        "UCX under NIXL found no transport that serves both ends' memory: a build without CUDA support, other UCX "
        "libraries first in the path, or a device that the two sides do not share",
        (
            Advice("see what UCX can do with GPU memory", "ucx_info -d | grep -E 'Transport|cuda'"),
            Advice("let it say what it tries", "UCX_LOG_LEVEL=info NIXL_LOG_LEVEL=DEBUG"),
            _OTHER_BACKEND,
        ),
        _CLASS_MISLEADS,
    ),
    Case(
        "rdma-failed",
        "rdma-transfer-failed",
        "cause",
        0.85,
        "an RDMA transfer failed between the two sides",
        "the two cards cannot reach each other with this port, GID or memory region",
        (
            _DEVICE,
            Advice(
                "see that the ports are up and of one kind, and test them alone",
                "ibstat; ib_write_bw -d mlx5_0 --use_cuda=0",
            ),
            Advice("on RoCE name the GID that is routed", "MC_GID_INDEX=3, NCCL_IB_GID_INDEX=3"),
            _OTHER_BACKEND,
        ),
        _CLASS_MISLEADS,
    ),
    Case(
        "transfer-engine-failed",
        "transfer-engine-failed",
        "symptom",
        0.75,
        "the Mooncake transfer engine could not start or reach its peer",
        "the peer's engine is gone or restarted, its port is not reachable, or the metadata is of another release "
        "of Mooncake",
        (
            _OTHER_SIDE,
            Advice("use the same Mooncake release on both sides", "pip show mooncake-transfer-engine"),
            Advice("see that the peer's port is reachable", "nc -vz PEER PORT"),
        ),
    ),
)

REASONS = (
    Case(
        "kv-corrupt",
        "kv-transfer-corrupt",
        "cause",
        0.85,
        "what arrived is not the KV of the request that waited for it",
        "a transfer wrote to slots that were given to another request meanwhile, or the two sides count buffers "
        "differently",
        (
            Advice("start both sides with one and the same release"),
            Advice("restart both sides together; one that was restarted alone leaves stale addresses in the other"),
            _OTHER_BACKEND,
        ),
        "right: the answer would have been garbage",
    ),
    Case(
        "kv-chunk-not-sent",
        "kv-transfer-failed",
        "symptom",
        0.85,
        "a KV transfer could not be sent",
        "the transfer engine refused or lost it; lines of its own, above this one or at start-up, say why",
        (
            Advice(
                "look for lines that begin with E and a date, from the start of the log on",
                "grep -nE '^E[0-9]{4} |NIXL|UCX' LOG",
            ),
            _DEVICE,
            _OTHER_BACKEND,
        ),
        _CLASS_MISLEADS,
    ),
    Case(
        "kv-peer-lost",
        "disaggregation-peer-lost",
        "symptom",
        0.85,
        "the server on the other side stopped answering",
        "the peer died, restarted or hangs; this side only notices",
        (_OTHER_SIDE,),
        "'could be dead' is a guess from a missed heartbeat or a failed session; a hung or restarted peer looks the "
        "same",
    ),
    Case(
        "kv-bootstrap",
        "disaggregation-bootstrap-failed",
        "symptom",
        0.8,
        "the two sides could not find each other through the bootstrap server",
        "the prefill server is not up yet, its bootstrap port is not reachable from here, or the address it registered "
        "is one that only it knows",
        (
            Advice("see that the port answers from the decode host", "curl -s http://PREFILL:8998/health"),
            Advice(
                "give the address that others reach, not 0.0.0.0 or localhost",
                "--host ADDRESS --disaggregation-bootstrap-port 8998",
            ),
            _OTHER_SIDE,
        ),
    ),
    Case(
        "kv-timed-out",
        "kv-transfer-timed-out",
        "symptom",
        0.8,
        "a KV transfer timed out waiting for the other side",
        "in Bootstrapping the decode side had not taken the request, mostly because its pool was full; in "
        "WaitingForInput the prefill side had not sent, mostly because it was queued or gone",
        (
            Advice("see whether decode is full or prefill is queued", "sgdiag status"),
            Advice(
                "if a longer wait is acceptable",
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=600 SGLANG_DISAGGREGATION_WAITING_TIMEOUT=600",
                "the default is 300 s",
            ),
            _OTHER_SIDE,
        ),
        _CLASS_MISLEADS,
    ),
    Case(
        "kv-aborted",
        "kv-transfer-aborted",
        "symptom",
        0.85,
        "the transfer ended because the request was aborted",
        "the client or the router gave up, mostly after its own time limit; nothing is wrong with the transfer itself",
        (
            Advice("look at the router's and client's time limits and health checks before the network"),
            Advice("see whether prefill is queued: long queues run into those limits", "sgdiag status"),
        ),
        _CLASS_MISLEADS,
    ),
    Case(
        "kv-other-rank",
        "kv-transfer-failed-elsewhere",
        "echo",
        0.8,
        "a transfer failed on another rank, which this log does not hold",
        "the rank that prints this only heard of it; the cause is in the line of the rank that failed",
        (
            Advice(
                "read the logs of all ranks of both sides; the one without 'another rank' has the cause",
                "sgdiag explain *.log",
            ),
        ),
        "right: the reason is not known here",
    ),
    Case(
        "kv-transfer",
        "kv-transfer-failed",
        "symptom",
        0.8,
        "a KV transfer failed",
        "the line gives no reason of its own; the transfer engine's lines around it may",
        (
            _OTHER_SIDE,
            Advice("look for the transfer engine's own errors", "grep -nE '^E[0-9]{4} |NIXL|UCX' LOG"),
            _OTHER_BACKEND,
        ),
        _CLASS_MISLEADS,
    ),
)

ERRNOS = {
    "12": "the limit on locked memory or on regions is reached (ENOMEM)",
    "14": "GPU memory is not open to the card (EFAULT): nvidia_peermem is not loaded, or the driver has no dma-buf "
    "support",
    "22": "the card refuses a region of this kind or size (EINVAL)",
}
