"""A sign: a text that SGLang or what it stands on (torch, NCCL, Triton, FlashInfer, the kernel) writes when something
fails, and the figures in it."""

from __future__ import annotations

from typing import NamedTuple


class Sign(NamedTuple):
    """``pattern`` is searched in each message (stamp and rank prefix taken off, long ones cut at 2048 bytes); its named
    groups become the sighting's fields. ``hints`` are literals of which every matching message holds at least one:
    most lines of a long log are passed over by looking for these only, so a hint should be rare in healthy logs. Each
    distinct hint costs time in every line that is looked at: one that other signs have already costs nothing more."""

    id: str
    pattern: str
    hints: tuple[str, ...]
