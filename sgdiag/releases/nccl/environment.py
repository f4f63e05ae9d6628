"""What NCCL's environment variables may hold, in NCCL 2.18 to 2.29."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SWITCHES = frozenset(
    {
        "NCCL_CUMEM_ENABLE",
        "NCCL_DMABUF_ENABLE",
        "NCCL_IB_DISABLE",
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_DIRECT_DISABLE",
        "NCCL_PXN_DISABLE",
        "NCCL_SHM_DISABLE",
    }
)

NUMBERS = SWITCHES | {
    "NCCL_BUFFSIZE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_TIMEOUT",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_CHUNKSIZE",
}
"""Variables that hold a whole number, also in hexadecimal."""

P2P_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
"""Distances between GPUs that are documented for NCCL_P2P_LEVEL, the nearest first."""

ALL_P2P_LEVELS = frozenset({*P2P_LEVELS, "NVB", "C2C", "P2C", "PXN", "NET", "DIS"})
"""Those that NCCL understands."""

LL128_STEP_BYTES = 120
"""LL128 sends 120 bytes of data in each line of 128: its buffer is a whole number of them."""

BUFFER_DEFAULT_BYTES: Mapping[str, int] = MappingProxyType({"NCCL_BUFFSIZE": 4 << 20, "NCCL_LL_BUFFSIZE": 512 << 10})
