"""What stopped a server that ran, or kept it from serving."""

from sgdiag.rules.postmortem.serving import (
    disaggregation,
    health,
    hicache,
    hicache_storage,
    parallel,
    startup,
    watchdog,
)

__all__ = ["disaggregation", "health", "hicache", "hicache_storage", "parallel", "startup", "watchdog"]
