"""Lines about ranks that do not reach each other, and the answer to each."""

from __future__ import annotations

import pytest

from tests.unit.incident_lines import (
    BEGIN,
    DEATH,
    LOAD,
    LOADED,
    READY,
    Case,
    args,
    check,
)

CUSTOM = "custom_all_reduce.cuh:37: "
NVLS = "transport/nvls.cc:254 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 4 : CUDA error {}"
CUDA_FAILURE = "misc/strongstream.cc:395 NCCL WARN Cuda failure 2 '{}'"

COLLECTIVES: tuple[Case, ...] = (
    # SGLang's custom allreduce.
    (
        "!custom-allreduce-no-peer-access",
        ("Setup Custom allreduce failed with peer access is not supported between these two devices.",),
        (),
    ),
    (
        "!custom-allreduce-no-peer-access",
        (CUDA_FAILURE.format("peer access is not supported between these two devices"),),
        (),
    ),
    ("custom-allreduce-failed", (CUSTOM + "'unspecified launch failure'",), ("FAIL 0.8 (custom-allreduce)",)),
    (
        "custom-allreduce-failed",
        (CUSTOM + "'an illegal memory access was encountered'",),
        ("FAIL 0.7 (custom-allreduce)",),
    ),
    (
        "custom-allreduce-failed",
        ("  all_reduce (sglang/srt/distributed/device_communicators/custom_all_reduce.py:290)",),
        ("a rank stands in custom allreduce", "the frames of the rank that stands elsewhere"),
    ),
    (
        "custom-allreduce-failed",
        ('  File "/opt/sglang/srt/distributed/device_communicators/custom_all_reduce.py", line 290 in all_reduce',),
        ("a rank stands in custom allreduce",),
    ),
    (
        "custom-allreduce-failed",
        ('  File "/opt/sglang/srt/distributed/device_communicators/custom_all_reduce.py", line 290, in all_reduce',),
        ("a failure passes through custom allreduce", "the exception under these frames"),
    ),
    (
        "custom-allreduce-silent",
        (BEGIN, "[2026-03-02 08:12:00 TP0] Registering 0 cuda graph addresses"),
        ("FAIL 0.6", "no buffer was registered"),
    ),
    (
        "custom-allreduce-silent",
        (BEGIN, "[2026-03-02 08:12:00 TP0] Registering 145 cuda graph addresses"),
        ("FAIL 0.6", "if nothing followed for a minute"),
    ),
    (
        "custom-allreduce-off",
        ("CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence",),
        ("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1",),
    ),
    (
        "custom-allreduce-off",
        ("CustomAllreduce is disabled because this process group spans across nodes.",),
        ("spans across nodes", "!SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"),
    ),
    (
        "custom-allreduce-off",
        ("Setup Custom allreduce failed",),
        ("its set-up failed", "!SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"),
    ),
    # NVLink multicast.
    (
        "nvls-multicast",
        (NVLS.format("401 'the operation cannot be performed in the present state'"),),
        ("FAIL 0.85", "Fabric Manager or NVSwitch state", "!used up, since"),
    ),
    (
        "nvls-multicast",
        (NVLS.format("2 'out of memory'"),),
        ("FAIL 0.7", "the multicast slots of the NVSwitches are used up", "!Fabric Manager or NVSwitch state"),
    ),
    ("nvls-multicast", ("NVLink SHARP (NVLS) Multicast memory",), ("FAIL 0.7", "Fabric Manager or NVSwitch state")),
    (
        "nvls-multicast",
        (NVLS.format("401 'x'"), "[2026-03-02 08:12:00 TP0] FlashInfer allreduce fusion workspace initialized"),
        ("FAIL 0.85",),
    ),
    ("nvls-multicast", (NVLS.format("401 'x'"), READY), ("WARN 0.85",)),
    # The NCCL library.
    (
        "nccl-version-mismatch",
        ("Failed to load NCCL library from /opt/libnccl.so.2 .",),
        ("/opt/libnccl.so.2 cannot be loaded",),
    ),
    (
        "nccl-version-mismatch",
        ("NCCL WARN Mismatched NCCL version detected : rank 3 version 2604 rank 0 version 21005",),
        ("rank 3 has NCCL 2604, rank 0 has 2.10.5",),
    ),
    ("nccl-version-mismatch", ("NCCL version mismatch",), ("the ranks have different NCCL versions",)),
    (
        "nccl-version-mismatch",
        (CUDA_FAILURE.format("CUDA driver version is insufficient for CUDA runtime version"),),
        ("the driver is too old for this NCCL",),
    ),
    (
        "nccl-version-mismatch",
        (CUDA_FAILURE.format("named symbol not found"),),
        ("the NCCL has no kernels for this GPU",),
    ),
    ("nccl-version-mismatch", ("upgrading nvidia-nccl-cu12 to 2.27.5 fixed it",), ("FAIL 0.5",)),
    ("!nccl-version-mismatch", (BEGIN, "upgrading nvidia-nccl-cu12 to 2.27.5 fixed it"), ()),
    # Errors that NCCL does not explain.
    (
        "nccl-unspecified-error",
        ("torch.distributed.DistBackendError: NCCL error\nncclInternalError: Internal check failed.",),
        ("NCCL failed (InternalError)", "0.4 (nccl-version-fabric-or-network)"),
    ),
    (
        "nccl-unspecified-error",
        ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed",),
        ("0.5 (nccl-shared-memory-or-out-of-memory)", "a /dev/shm that is too small"),
    ),
    (
        "nccl-unspecified-error",
        ("ncclUnhandledCudaError: Call to CUDA function failed.",),
        ("NCCL failed (UnhandledCudaError)", "0.4 (nccl-version-fabric-or-network)"),
    ),
    ("nccl-unspecified-error", (CUDA_FAILURE.format("unknown error"),), ("NCCL failed (unknown error)",)),
    ("!nccl-unspecified-error", (CUDA_FAILURE.format("unknown error"), READY), ()),
    ("!nccl-unspecified-error", (CUDA_FAILURE.format("out of memory"),), ()),
    # Memory of NCCL.
    ("!nccl-out-of-memory", ("Failed to CUDA calloc 10485760 bytes", NVLS.format("2 'out of memory'")), ()),
    (
        "nccl-out-of-memory",
        (LOAD, "Failed to CUDA calloc 10485760 bytes"),
        ("(10.0 MiB wanted)", "leave about 1.6 GB more outside SGLang's pools"),
    ),
    (
        "nccl-out-of-memory",
        (args(mem_fraction_static=0.88), "Failed to CUDA calloc 10485760 bytes"),
        ("leave about 1.6 GB more outside SGLang's pools",),
    ),
    (
        "nccl-out-of-memory",
        (args(mem_fraction_static=0.88), LOAD, "Failed to CUDA calloc 10485760 bytes"),
        ("--mem-fraction-static 0.86", "1.6 GB more for NCCL on each GPU"),
    ),
    (
        "nccl-shared-memory",
        (
            "Error while creating shared memory segment /dev/shm/nccl-9 (size 9637888)",
            "unhandled system error, run with NCCL_DEBUG=INFO",
        ),
        ("which holds 6 segments of 9.2 MiB", "'run with NCCL_DEBUG=INFO' is right"),
    ),
    (
        "nccl-shared-memory",
        ("Error while creating shared memory segment /dev/shm/nccl-9 (size 0)",),
        ("!segments of 0", "!'run with NCCL_DEBUG=INFO' is right"),
    ),
    # Interfaces and sockets.
    (
        "socket-interface-unknown",
        ("RuntimeError: Unable to find address for: eth0.",),
        ("no interface or address 'eth0' on this host",),
    ),
    ("socket-interface-unknown", ("RuntimeError: Unable to find interface for: =eth0",), ("'=eth0' is NCCL's way",)),
    (
        "socket-interface-unknown",
        ("RuntimeError: Unable to find interface for: eth0,eth1",),
        ("'eth0,eth1' is NCCL's way",),
    ),
    (
        "socket-interface-unknown",
        ("NCCL WARN Bootstrap : no socket interface found",),
        ("NCCL_SOCKET_IFNAME matches no interface",),
    ),
    (
        "nccl-socket-failed",
        ("NCCL WARN socketStartConnect: Connect to 10.0.0.1<5000> failed : Network is unreachable",),
        ("FAIL 0.9", "was told: Network is unreachable"),
    ),
    ("nccl-socket-failed", ("NCCL WARN Call to bind failed",), ("FAIL 0.8", "!was told")),
    ("nccl-infiniband", ("NET/IB : Got completion from peer 10.0.0.1<5000> with status=12 opcode=0",), ("FAIL 0.7",)),
    ("nccl-infiniband", ("NET/IB : Got completion from peer 10.0.0.1<5000> with status=5 opcode=0",), ("FAIL 0.7",)),
    ("nccl-infiniband", ("NET/IB : Got completion from peer 10.0.0.1<5000> with status=13 opcode=0",), ("FAIL 0.7",)),
    ("nccl-infiniband", ("NET/IB : Got completion from peer 10.0.0.1<5000> with status=4 opcode=0",), ("FAIL 0.85",)),
    (
        "nccl-infiniband",
        ("NET/IB : Got completion from peer 10.0.0.1<5000> with status=99 opcode=0",),
        ("FAIL 0.85", "the adapter reported status 99"),
    ),
    (
        "nccl-infiniband",
        ("NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",),
        ("FAIL 0.85", "ibv_modify_qp failed (Invalid argument)", "NCCL_IB_HCA=mlx5_0"),
    ),
    ("nccl-infiniband", ("NET/IB : Unable to open device mlx5_0",), ("the adapter reported that it cannot be opened",)),
    # Silence.
    (
        "communicator-silent",
        (args(4), BEGIN, "host:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"),
        ("FAIL 0.7", "transport: P2P"),
    ),
    (
        "communicator-silent",
        (args(4), BEGIN, "host:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct"),
        ("FAIL 0.5", "transport: SHM"),
    ),
    ("communicator-silent", (args(4), BEGIN), ("WARN 0.4",)),
    ("communicator-silent", (args(4), BEGIN, LOAD, "host:1:1 [0] NCCL INFO Using network Socket"), ("FAIL 0.5",)),
    ("!communicator-silent", (args(4), BEGIN, LOAD, LOADED), ()),
    ("!communicator-silent", (args(4), BEGIN, "Setup Custom allreduce failed with odd."), ()),
    ("!communicator-silent", (args(4), BEGIN, DEATH), ()),
    # Collectives that did not end.
    (
        "nccl-timeout",
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, "
            "NumelIn=10, NumelOut=10, Timeout(ms)=600000)",
        ),
        ("FAIL 0.75", "(ALLREDUCE, number 88 of its group, 10 elements in)"),
    ),
    ("nccl-timeout", ("Some NCCL operations have failed or timed out.",), ("FAIL 0.5", "(a collective)")),
    (
        "nccl-timeout",
        ("Watchdog caught collective operation timeout", "OpType=BROADCAST, NumelIn=7"),
        ("(BROADCAST, 7 elements in)",),
    ),
    ("nccl-timeout", (BEGIN, "Watchdog caught collective operation timeout"), ("no rank had begun to load",)),
    (
        "nccl-timeout",
        (LOAD, LOADED, READY, "Watchdog caught collective operation timeout"),
        ("a rank did not take part",),
    ),
    (
        "nccl-timeout-while-loading",
        (
            args(2),
            LOAD,
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=600000)",
        ),
        ("FAIL 0.9", "--dist-timeout 3600", "TP0 had not said Load weight end"),
    ),
    (
        "nccl-timeout-while-loading",
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=300000)",
        ),
        ("FAIL 0.8", "--dist-timeout 1800", "!had not said"),
    ),
    (
        "!nccl-timeout-while-loading",
        ("Watchdog caught collective operation timeout", "OpType=ALLREDUCE, NumelIn=1"),
        (),
    ),
    (
        "!nccl-timeout-while-loading",
        (
            args(2),
            LOAD,
            READY,
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1)",
        ),
        (),
    ),
    (
        "nccl-timeout-while-loading",
        (
            *(LOAD.replace("TP0", f"TP{tp}") for tp in range(6)),
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1)",
        ),
        ("(TP0, TP1, TP2, TP3 and 2 more had not said", "--dist-timeout 3600"),
    ),
    (
        "nccl-timeout-in-logits",
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=_ALLGATHER_BASE, "
            "NumelIn=37984, NumelOut=151936, Timeout(ms)=600000)",
        ),
        ("FAIL 0.75", "1 row(s) of a vocabulary of 151936 over 4 ranks", "--dist-timeout 1800"),
    ),
    (
        "!nccl-timeout-in-logits",
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=_ALLGATHER_BASE, "
            "NumelIn=151936, NumelOut=151936)",
        ),
        (),
    ),
    (
        "!nccl-timeout-in-logits",
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, NumelIn=37984, "
            "NumelOut=151936)",
        ),
        (),
    ),
    (
        "nccl-timeout",
        (
            *(LOADED.replace("TP0", f"TP{tp}") for tp in range(4)),
            *(
                f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, "
                f"OpType=ALLREDUCE, NumelIn=10)"
                for rank in (0, 1, 3)
            ),
        ),
        ("of ranks 0 to 3 only 2 did not report it",),
    ),
    (
        "nccl-timeout",
        (
            *(LOADED.replace("TP0", f"TP{tp}") for tp in range(2)),
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, NumelIn=10)",
        ),
        ("of ranks 0, 1 only 1 did not report it",),
    ),
    (
        "nccl-timeout",
        (
            *(LOADED.replace("TP0", f"TP{tp}") for tp in range(4)),
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, NumelIn=10)",
        ),
        ("!did not report it",),
    ),
)


@pytest.mark.parametrize("case", COLLECTIVES, ids=lambda case: case[0])
def test_the_answer(case: Case) -> None:
    check(case)
