"""Mistakes that the tests must find. Needs no torch."""

from __future__ import annotations

MISTAKES = {
    "single buffer": ("static_cast<u64>(epoch % 2) * SLOT_BYTES", "0"),
    "epoch of the block": ("i < MAX_BLOCKS; i += blockDim.x * blocks", "i == block; ++i"),
    "sentinel not reset": (
        "INLINE void taken(char* from) { store_pair(from, SENTINEL, SENTINEL); }",
        "INLINE void taken(char*) {}",
    ),
}
"""Changes to the source, each of which must be found."""


def with_mistake(text: str, right: str, wrong: str) -> str:
    """A source with one of them. ValueError where the source has changed so that it has no one place for it."""
    if text.count(right) != 1:
        raise ValueError(f"{text.count(right)} places in the source for the mistake in '{right}'")
    return text.replace(right, wrong)
