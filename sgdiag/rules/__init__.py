"""Findings: pure functions from a snapshot, one module per family."""

from sgdiag.rules import (
    accounts,
    arguments,
    batches,
    collectives,
    environment,
    graphs,
    hangs,
    kv,
    nccl,
    processes,
    server,
    software,
    speculation,
)
from sgdiag.rules.registry import evaluate, families, rule_ids

__all__ = [
    "accounts",
    "arguments",
    "batches",
    "collectives",
    "environment",
    "evaluate",
    "families",
    "graphs",
    "hangs",
    "kv",
    "nccl",
    "processes",
    "rule_ids",
    "server",
    "software",
    "speculation",
]
