"""What one more NCCL communicator takes of a GPU's memory, measured by what is free before and after.

    python -m tests.benchmarks.nccl_memory [--ranks 2]

Needs torch and one otherwise idle GPU for each rank, and takes NCCL's settings from the environment as they are. The
first communicator also loads NCCL's kernels; the second is the figure that `sgdiag.analysis.nccl` predicts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

try:
    import torch
    from torch import distributed, multiprocessing
except ImportError:
    sys.exit("torch is not installed here: run it with SGLang's interpreter")

MIB = 1 << 20
SMALL, LARGE = 256, 16 << 20
"""Elements of a collective."""


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def measure(rank: int, ranks: int, store: str) -> None:
    """One rank; the last prints a line for each step."""
    torch.cuda.set_device(rank)
    data = torch.ones(LARGE, device="cuda")
    # Whatever torch itself loads with its first kernel is there before anything is counted.
    (data[:SMALL] + data[:SMALL]).sum().item()
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    before = free_bytes()
    for name in ("first communicator", "second communicator"):
        group = distributed.new_group(list(range(ranks)), backend="nccl")
        for count in (SMALL, LARGE):
            distributed.all_reduce(data[:count], group=group)
            after = free_bytes()
            if rank == ranks - 1:
                print(f"{(before - after) / MIB:8.1f} MiB  {name}, allreduce of {4 * count:,} bytes", flush=True)
            before = after
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    ranks = parser.parse_args().ranks
    if not 1 <= ranks <= torch.cuda.device_count():
        sys.exit(f"--ranks {ranks}: each rank needs a GPU of its own, and {torch.cuda.device_count()} can be seen here")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, args=(ranks, f"{folder}/store"), nprocs=ranks)


if __name__ == "__main__":
    main()
