"""Units of memory."""

from __future__ import annotations

GIB = 2**30
"""Bytes in what SGLang calls a GB, in every endpoint, metric and log line."""
