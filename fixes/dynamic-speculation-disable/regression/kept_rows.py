"""Drives what the patch keeps of plain steps, and prints as JSON how often a request's rows were right and wrong.

    python kept_rows.py

Runs in the interpreter that imports SGLang, on any machine: what a CUDA graph would replay is called instead, padding
and the capture's own runs included. A lab's server has no graphs, and a wrong row shows in no token.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import torch
from sglang.srt.speculative.plain_decode import PlainDecodeGraphRunner, _Kept
from sglang.srt.speculative.plain_decode_kept import KeptRows

MAX_STEPS = 64
GRAPH_SIZES = (8, 16, 24, 32, 40)
REQUESTS = GRAPH_SIZES[-1]
CAPTURE_RUNS = 3
STEPS = 150


def empty(capacity: int) -> _Kept:
    """A ring of that many rows, as the constructor makes it out of a model's worker."""
    kept = _Kept.__new__(_Kept)
    kept.rows = KeptRows(capacity, MAX_STEPS)
    kept.hidden_states = torch.zeros(capacity, 2)
    kept.tokens = torch.zeros(capacity, dtype=torch.int64)
    kept.next_row = torch.zeros((), dtype=torch.int64)
    kept.offsets = torch.arange(capacity)
    return kept


def forward(tokens: torch.Tensor, positions: torch.Tensor, _batch: object) -> SimpleNamespace:
    """Hidden states that tell token and position."""
    return SimpleNamespace(hidden_states=torch.stack([tokens, positions], 1).float())


def drive(seed: int) -> tuple[int, int]:
    """Rows that were right, and requests of which some were not."""
    chance = random.Random(seed)  # noqa: S311
    kept = empty(chance.randint(REQUESTS, 300))
    runner = PlainDecodeGraphRunner.__new__(PlainDecodeGraphRunner)
    runner.kept = kept
    replay = runner._keeping(forward)
    for _ in range(CAPTURE_RUNS):
        replay(torch.arange(8), torch.arange(8), None)
    kept.begin()
    requests, lengths = [object() for _ in range(REQUESTS)], [chance.randint(1, 50) for _ in range(REQUESTS)]
    right = wrong = 0
    for _ in range(STEPS):
        count = chance.choice((5, 9, 20, 40))
        members = sorted(chance.sample(range(REQUESTS), count)) if chance.random() < 0.1 else range(count)
        for i in members:
            lengths[i] += 1
        tokens = torch.tensor([1000 * i + lengths[i] for i in members])
        positions = torch.tensor([lengths[i] for i in members])
        size = count
        if chance.random() < 0.7:
            size = next(size for size in GRAPH_SIZES if size >= count)
            padding = torch.zeros(size - count, dtype=torch.int64)
            replay(torch.cat([tokens, padding]), torch.cat([positions, padding]), None)
        else:
            kept.store(tokens, forward(tokens, positions, None).hidden_states)
        kept.rows.append([requests[i] for i in members], [lengths[i] for i in members], size)
        for i, rows in enumerate(kept.rows.history(requests, lengths)):
            past = list(range(lengths[i] - len(rows) + 1, lengths[i] + 1))
            inputs = [1000 * i + length for length in past]
            if kept.tokens[rows].tolist() == inputs and kept.hidden_states[rows].tolist() == [
                [float(token), float(position)] for token, position in zip(inputs, past, strict=True)
            ]:
                right += len(rows)
            else:
                wrong += 1
    return right, wrong


def main() -> None:
    found = [drive(seed) for seed in range(10)]
    counted = {"right": sum(right for right, _ in found), "wrong": sum(wrong for _, wrong in found)}
    print(json.dumps(counted))  # noqa: T201 - its output


if __name__ == "__main__":
    main()
