"""The memory of a rank: where it went, and what would change it."""
