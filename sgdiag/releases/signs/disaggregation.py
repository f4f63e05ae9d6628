"""Prefill and decode on different servers: KV transfers, their transports, bootstrap, router."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

_TRANSFER = (
    Sign(
        "kv-transfer",
        r"(?:Prefill|Decode) (?:transfer|bootstrap|handshake) failed for request|KVTransferError",
        (
            "transfer failed for request",
            "bootstrap failed for request",
            "handshake failed for request",
            "KVTransferError",
        ),
    ),
    Sign(
        "kv-aborted",
        r"Aborted by (?:AbortReq|decode-side abort|user)",
        ("Aborted by ",),
    ),
    Sign("kv-other-rank", r"unknown reason from another rank", ("from another rank",)),
    Sign(
        "kv-timed-out",
        r"timed out after [\d.]+s\s*in KVPoll\.|Request \S+ waiting_timeout"
        r"|Timed out waiting for prefill completion|Some requests timed out when bootstrapping"
        r"|fail to receive KV Cache transfer done signal",
        (
            "in KVPoll.",
            "waiting_timeout",
            "Timed out waiting for prefill",
            "Some requests timed out",
            "transfer done signal",
        ),
    ),
    Sign(
        "kv-chunk-not-sent",
        r"Failed to send (?:kv chunk|state components) of|Transfer thread failed because of",
        ("Failed to send kv", "Failed to send state", "Transfer thread failed"),
    ),
    Sign(
        "kv-peer-lost",
        r"Decode instance could be dead|(?:Losing|Lost) connection with prefill instance"
        r"|Failed to get kvcache from prefill instance|is healthy before, but now it is down"
        r"|failed due to (?:node failure|prefill down)",
        (
            "Decode instance could be dead",
            "connection with prefill",
            "Failed to get kvcache",
            "is healthy before",
            "due to node failure",
            "due to prefill down",
        ),
    ),
    Sign(
        "kv-bootstrap",
        r"Could not fetch (?:bootstrap info|prefill (?:parallel|server) info)"
        r"|failed to (?:register|connect) to bootstrap server|Failed to get prefill (?:parallel|server) info"
        r"|Error fetching prefill (?:parallel |server )?info from bootstrap|Prefill register attempt \d+/\d+ failed",
        (
            "Could not fetch",
            "to bootstrap server",
            "Failed to get prefill",
            "Error fetching prefill",
            "Prefill register attempt",
        ),
    ),
    Sign(
        "kv-corrupt",
        r"Metadata corruption detected|KV checksum mismatch",
        ("Metadata corruption", "KV checksum mismatch"),
    ),
    Sign(
        "kv-mismatch",
        r"(?:Page size|KV cache dtype|KV layout|Disaggregation decode allocation policy) mismatch: "
        r"|PD Disaggregation (?:via NIXL )?does NOT support|heterogeneous TP not supported|PD peers (?:disagree|must)"
        r"|do not match prefill pp configuration|exceeds target token slot size"
        r"|Slice size exceeds destination|Mamba state \S.*differs? between prefill"
        r"|Layer metadata (?:length|must)|follow_bootstrap_room conflict",
        (
            " mismatch: ",
            "does NOT support",
            "heterogeneous TP not",
            "PD peers",
            "prefill pp configuration",
            "target token slot size",
            "Slice size exceeds",
            "between prefill",
            "Layer metadata",
            "follow_bootstrap_room conflict",
        ),
    ),
)

_TRANSPORT = (
    Sign(
        "kv-memory-not-registered",
        r"Failed to register memory(?: \S+ .*\[(?P<errno>\d+)\])?"
        r"|[Mm]ooncake memory registration failed|NIXL memory registration failed|Mooncake's batch register",
        ("Failed to register memory", "memory registration failed", "batch register"),
    ),
    Sign(
        "rdma-failed",
        r"local protection error|retry counter exceeded|remote access error|Work completion error"
        r"|Failed to modify QP to|Process failed for slice|Failed to create QP|Cannot make connection for endpoint",
        (
            "local protection error",
            "retry counter exceeded",
            "remote access error",
            "Work completion error",
            "Failed to modify QP",
            "Process failed for slice",
            "Failed to create QP",
            "Cannot make connection",
        ),
    ),
    Sign(
        "kv-over-tcp",
        r"tcp_transport\.cpp:\d+\].*(?:[Ee]rror|[Ee]xception|[Ff]ailed)",
        ("tcp_transport.cpp",),
    ),
    Sign(
        "rdma-no-device",
        r"Found 0 HCAs|No RDMA devices? found|No IB devices configured for GPU",
        ("Found 0 HCAs", "No RDMA device", "No IB devices"),
    ),
    Sign(
        "nixl-failed",
        r"nixlBackendError|NIXL_ERR_[A-Z]|NIXL KV(?:Sender|Receiver) Exception|NIXL transfer encountered ERR"
        r"|NIXL backend '\w+' not found|KVSender failed to (?:create|post)|KVSender transfer encountered",
        (
            "nixlBackendError",
            "NIXL_ERR_",
            "NIXL KV",
            "NIXL transfer enc",
            "NIXL backend '",
            "KVSender failed",
            "KVSender transfer",
        ),
    ),
    Sign(
        "ucx-failed",
        r"\bUCX  ?ERROR|Unexpected UCX error|UCX endpoint create failed|libuc[pt][-\w.]*\.so",
        ("UCX  ERROR", "UCX ERROR", "UCX error", "UCX endpoint", "libucp", "libuct"),
    ),
    Sign("crash-signal", r"Caught signal \d+ \(", ("Caught signal",)),
    Sign(
        "transfer-engine-failed",
        r"Mooncake Transfer Engine initialization failed|Failed to open segment|Failed to get segment descriptor"
        r"|SocketHandShakePlugin.*(?:refused|failed|timed out)",
        ("Transfer Engine init", "Failed to open segment", "SocketHandShakePlugin", "segment descriptor"),
    ),
)

_ROUTER = (
    Sign(
        "router-no-workers",
        r"No available (?P<role>prefill|decode) workers"
        r"|Failed to select (?:PD pair|worker pair|(?P<pick>prefill|decode) worker)"
        r"|No (?:healthy )?(?P<kind>prefill|decode) (?:workers|servers) (?:are )?available",
        (
            "No available prefill",
            "No available decode",
            "Failed to select",
            "prefill workers",
            "decode workers",
            "prefill servers",
            "decode servers",
        ),
    ),
)

SIGNS: tuple[Sign, ...] = (*_TRANSFER, *_TRANSPORT, *_ROUTER)
