"""Findings: pure functions from a snapshot, one module per family."""

from sgdiag.rules import batches, collectives, graphs, kv, processes, server, speculation
from sgdiag.rules.registry import evaluate, rule_ids

__all__ = ["batches", "collectives", "evaluate", "graphs", "kv", "processes", "rule_ids", "server", "speculation"]
