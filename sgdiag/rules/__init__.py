"""Findings: pure functions from a snapshot, one module per family."""

from sgdiag.rules import (
    accounts,
    arguments,
    batches,
    collectives,
    environment,
    graphs,
    kv,
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
    "kv",
    "processes",
    "rule_ids",
    "server",
    "software",
    "speculation",
]
