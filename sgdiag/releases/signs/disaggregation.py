"""Prefill and decode on different servers: KV transfers, their transports, bootstrap, router."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

_TRANSFER = (
    Sign(
        "kv-transfer",
        r"(?:Prefill|Decode) (?:transfer|bootstrap|handshake) failed for request|KVTransferError",
        ("KVTransferError", "failed for request"),
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
        ("waiting_timeout", "Some requests timed out", "transfer done signal", "KVPoll", "Timed out "),
    ),
    Sign(
        "kv-chunk-not-sent",
        r"Failed to send (?:kv chunk|state components) of|Transfer thread failed because of",
        ("Transfer thread failed", "Failed to "),
    ),
    Sign(
        "kv-peer-lost",
        r"Decode instance could be dead|(?:Losing|Lost) connection with prefill instance"
        r"|Failed to get kvcache from prefill instance|is healthy before, but now it is down"
        r"|failed due to (?:node failure|prefill down)",
        (
            "Decode instance could be dead",
            "connection with prefill",
            "is healthy before",
            "due to prefill down",
            " failure",
            "Failed to ",
        ),
    ),
    Sign(
        "kv-bootstrap",
        r"Could not fetch (?:bootstrap|prefill parallel) info"
        r"|failed to (?:register|connect) to bootstrap server|Failed to get prefill (?:parallel|server) info"
        r"|Error fetching prefill (?:parallel |server )?info from bootstrap|Prefill register attempt \d+/\d+ failed"
        r"|bootstrap_thread died",
        (
            "Could not fetch",
            "Error fetching prefill",
            "Prefill register attempt",
            "bootstrap_thread died",
            "Failed to ",
            "ootstrap server",
        ),
    ),
    Sign(
        "kv-corrupt",
        r"Metadata corruption detected|KV checksum mismatch",
        ("Metadata corruption", "ismatch"),
    ),
    Sign(
        "kv-mismatch",
        r"(?:Page size|KV cache dtype|KV layout|Disaggregation decode allocation policy) mismatch: "
        r"|PD Disaggregation (?:via NIXL )?does NOT support|heterogeneous TP not supported|PD peers (?:disagree|must)"
        r"|do not match prefill pp configuration|exceeds target token slot size"
        r"|Slice size exceeds destination|Mamba state \S.*differs? between prefill"
        r"|Layer metadata (?:length|must)|follow_bootstrap_room conflict",
        (
            "PD peers",
            "prefill pp configuration",
            "target token slot size",
            "Slice size exceeds",
            "between prefill",
            "Layer metadata",
            "bootstrap_room",
            "isaggregat",
            "ismatch",
            "ot supported",
        ),
    ),
)

_TRANSPORT = (
    Sign(
        "kv-memory-not-registered",
        r"Fail(?:ed)? to register memory(?: \S+ .*\[(?P<errno>\d+)\])?"
        r"|[Mm]ooncake memory registration failed|NIXL memory registration failed|Mooncake's batch register",
        (" to register memory", "NIXL", "ooncake"),
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
            "Process failed for slice",
            "Cannot make connection",
            "Failed to ",
        ),
    ),
    Sign(
        "kv-over-tcp",
        r"tcp_transport\.cpp:\d+\].*(?:[Ee]rror|[Ee]xception|[Ff]ailed)",
        (".cpp",),
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
        ("nixlBackendError", "KVSender ", "NIXL"),
    ),
    Sign(
        "ucx-failed",
        r"\bUCX  ?ERROR|Unexpected UCX error|UCX endpoint create failed|libuc[pt][-\w.]{0,60}\.so",
        ("libucp", "libuct", "UCX "),
    ),
    Sign("crash-signal", r"Caught signal \d+ \(", ("Caught signal",)),
    Sign(
        "transfer-engine-failed",
        r"Mooncake Transfer Engine initialization failed|Failed to open segment|Failed to get segment descriptor"
        r"|SocketHandShakePlugin.*(?:refused|failed|timed out)"
        r"|^[EF]\d{4} .{1,40}\b(?:rdma_\w+|worker_pool|endpoint_store|multi_transport|nvlink_transport"
        r"|transfer_(?:engine|metadata|task)\w*)\.cpp:\d+\]",
        ("SocketHandShakePlugin", ".cpp", "Failed to ", "ooncake"),
    ),
)

_ROUTER = (
    Sign(
        "router-no-workers",
        r"No available (?P<role>prefill|decode) workers"
        r"|Failed to select (?:PD pair|(?P<pick>prefill|decode) worker)"
        r"|No (?:healthy )?(?P<kind>prefill|decode) (?:workers|servers) (?:are )?available",
        ("prefill workers", "decode workers", "prefill servers", "decode servers", "Failed to "),
    ),
)

SIGNS: tuple[Sign, ...] = (*_TRANSFER, *_TRANSPORT, *_ROUTER)
