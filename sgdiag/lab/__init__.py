"""A real, unmodified SGLang server on a CPU, with tiny models whose every greedy token is known.

    lab = up("0.5.23", speculative=True, accept=0.8)
    result = load(lab, concurrency=4, requests=16, max_new_tokens=64)
    assert result.wrong_tokens == 0
    down(lab.name)

The server is SGLang as published: its scheduler, radix cache, KV pool, speculative workers, metrics and process tree.
Only the compiled kernels are replaced by references, through a folder on its PYTHONPATH. What a lab on a CPU cannot
show: CUDA graphs, NCCL (ranks talk through gloo), and GPU memory. Speed means nothing here, and releases before
0.5.18 run their speculative kernels on Triton's interpreter at about 2 tokens/s.

Environments, models, logs and state lie in `SGDIAG_LAB_HOME`, by default `sgdiag/lab` in the user's cache folder. All
functions raise LabError, one line that says what to do. Servers listen on 127.0.0.1 only.
"""

from __future__ import annotations

from sgdiag.lab.errors import LabError
from sgdiag.lab.loading import LoadResult, OutputCheck, check_output
from sgdiag.lab.loading import run as load
from sgdiag.lab.releases import NEWEST, RELEASES
from sgdiag.lab.server import describe, down, find, labs, up
from sgdiag.lab.state import Lab

__all__ = [
    "NEWEST",
    "RELEASES",
    "Lab",
    "LabError",
    "LoadResult",
    "OutputCheck",
    "check_output",
    "describe",
    "down",
    "find",
    "labs",
    "load",
    "up",
]
