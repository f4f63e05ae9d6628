"""Drives what the patch keeps of plain steps, and prints as JSON how often a request's rows were right and wrong, and
what of the draft model's input is wrong when speculation resumes.

    python kept_rows.py

Runs in the interpreter that imports SGLang, on any machine: a stand-in for the target calls what a CUDA graph would
replay, with padding, and a stand-in for the capture calls it some times, too. A lab's server has no graphs, and a wrong
row shows in no token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.speculative.plain_decode import PlainDecode, PlainDecodeGraphRunner, _Kept
from sglang.srt.speculative.plain_decode_kept import KeptRows
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

MAX_STEPS = 64
GRAPH_SIZES = (8, 16, 24, 32, 40)
REQUESTS = GRAPH_SIZES[-1]
CAPTURE_RUNS = 3
STEPS = 150
WIDTH = 4
"""Tokens of a request in a verify step."""

OF_A_PROMPT = ("multimodal_inputs", "input_embeds", "replace_embeds", "replace_positions")
"""What a batch may still hold of the prompts of its requests."""

Forward = Callable[[torch.Tensor, torch.Tensor, object], SimpleNamespace]


def empty(capacity: int) -> _Kept:
    """A ring of that many rows, as the constructor makes it out of a model's worker."""
    kept = _Kept.__new__(_Kept)
    kept.mrope = False
    kept.rows = KeptRows(capacity, MAX_STEPS)
    kept.hidden_states = torch.zeros(capacity, 2)
    kept.tokens = torch.zeros(capacity, dtype=torch.int64)
    kept.next_row = torch.zeros((), dtype=torch.int64)
    kept.offsets = torch.arange(capacity)
    return kept


def forward(tokens: torch.Tensor, positions: torch.Tensor, _batch: object) -> SimpleNamespace:
    """Hidden states that tell token and position."""
    return SimpleNamespace(hidden_states=torch.stack([tokens, positions], 1).float())


def captured(kept: _Kept) -> PlainDecodeGraphRunner:
    """The graphs: of each size what is to be replayed."""
    runner = PlainDecodeGraphRunner.__new__(PlainDecodeGraphRunner)
    runner.kept, runner.plain_hidden_mode, runner.graphs = kept, None, {}

    def capture(self: Any) -> None:
        for size in GRAPH_SIZES:
            self.capture_one_shape(size, forward)

    def capture_one_shape(self: Any, size: int, graph: Forward, *_: object) -> None:
        for _run in range(CAPTURE_RUNS):
            graph(torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64), None)
        self.graphs[size] = graph

    with (
        patch.object(DecodeCudaGraphRunner, "capture", capture),
        patch.object(DecodeCudaGraphRunner, "capture_one_shape", capture_one_shape),
    ):
        runner.capture()
    return runner


class Target:
    """Replays a graph for most batches."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.model_runner = SimpleNamespace(
            attn_backend=None,
            decode_cuda_graph_runner=None,
            war_fastpath_read_done_event=None,
            shared_read_done_event=None,
        )

    def forward_batch_generation(self, batch: SimpleNamespace, **_: object) -> SimpleNamespace:
        runner, count = self.model_runner.decode_cuda_graph_runner, len(batch.reqs)
        graph = self._chance.random() < 0.7
        if graph:
            runner.bs = next(size for size in GRAPH_SIZES if size >= count)
            padding = torch.zeros(runner.bs - count, dtype=torch.int64)
            run, inputs = runner.graphs[runner.bs], [torch.cat([one, padding]) for one in (batch.input_ids, batch.lens)]
        else:
            run, inputs = forward, [batch.input_ids, batch.lens]
        output = SimpleNamespace(hidden_states=run(*inputs, None).hidden_states[:count])
        return SimpleNamespace(can_run_cuda_graph=graph, logits_output=output)


def decoder(kept: _Kept, chance: random.Random) -> PlainDecode:
    plain = PlainDecode.__new__(PlainDecode)
    draft = SimpleNamespace(draft_runner=SimpleNamespace())
    plain.worker = SimpleNamespace(target_worker=Target(chance), draft_worker=draft)
    plain.kept, plain.hidden_mode, plain.attn_backend = kept, None, None
    plain.graph_runner = captured(kept)
    return plain


def step(requests: Sequence[object], tokens: list[int], lens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        reqs=requests,
        input_ids=torch.tensor(tokens),
        lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        return_hidden_states=False,
    )


def drive(seed: int) -> tuple[int, int]:
    """Rows that were right, and requests of which some were not."""
    chance = random.Random(seed)  # noqa: S311
    kept = empty(chance.randint(REQUESTS, 300))
    plain = decoder(kept, chance)
    requests, lengths = [object() for _ in range(REQUESTS)], [chance.randint(1, 50) for _ in range(REQUESTS)]
    right = wrong = 0
    for _ in range(STEPS):
        count = chance.choice((5, 9, 20, 40))
        members = sorted(chance.sample(range(REQUESTS), count)) if chance.random() < 0.1 else range(count)
        for i in members:
            lengths[i] += 1
        tokens = [1000 * i + lengths[i] for i in members]
        plain.forward(step([requests[i] for i in members], tokens, [lengths[i] for i in members]))
        for i, rows in enumerate(kept.rows.history(requests, lengths)):
            past = range(lengths[i] - len(rows) + 1, lengths[i] + 1)
            inputs = [1000 * i + length for length in past]
            states = [[float(token), float(length)] for token, length in zip(inputs, past, strict=True)]
            if kept.tokens[rows].tolist() == inputs and kept.hidden_states[rows].tolist() == states:
                right += len(rows)
            else:
                wrong += 1
    return right, wrong


class Resumed:
    """Three requests that have taken some plain steps when speculation resumes; request i has slot 100 i + p at p."""

    counts, lens = [2, WIDTH, 3], [12, 7, 30]
    bonus = torch.tensor([7, 8, 9])

    def __init__(self, *, mrope: bool) -> None:
        kept = empty(300)
        self.plain = decoder(kept, random.Random(0))  # noqa: S311
        self.plain.kept.mrope = mrope
        requests = [object() for _ in self.counts]
        for age in reversed(range(max(self.counts))):
            members = [i for i, count in enumerate(self.counts) if age < count]
            lens = [self.lens[i] - age for i in members]
            tokens = [1000 * i + length for i, length in zip(members, lens, strict=True)]
            self.plain.forward(step([requests[i] for i in members], tokens, lens))
        self.plain.resuming = kept.rows.history(requests, self.lens), self.lens
        worker = self.plain.worker
        worker.speculative_num_draft_tokens = WIDTH
        worker.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(300).view(3, 100))
        worker.draft_worker.plan_stream = None
        worker.draft_worker._draft_extend_for_prefill = self.prefill
        worker.draft_worker._draft_extend_for_decode = self.decode
        self.batch = SimpleNamespace(
            device="cpu",
            req_pool_indices=torch.arange(3),
            seq_lens=torch.tensor(self.lens),
            orig_seq_lens=torch.tensor(self.lens),
            seq_lens_cpu=torch.tensor(self.lens),
            spec_info=SimpleNamespace(bonus_tokens=self.bonus),
            **dict.fromkeys(OF_A_PROMPT, "of a prompt"),
        )
        self.wrong: list[str] = []
        self.plain.catch_up(self.batch)

    def steps_of(self, i: int) -> range:
        return range(self.lens[i] - self.counts[i] + 1, self.lens[i] + 1)

    def expect(self, name: str, found: Any, wanted: Any) -> None:
        found = found.tolist() if isinstance(found, torch.Tensor) else found
        self.wrong += [f"{name} is {found}, not {wanted}"] if found != wanted else []

    def prefill(self, part: SimpleNamespace, states: torch.Tensor, following: torch.Tensor) -> str:
        every = [(i, length) for i in range(3) for length in self.steps_of(i)]
        self.expect("input", part.input_ids, [1000 * i + length for i, length in every])
        self.expect("hidden states", states, [[1000.0 * i + length, float(length)] for i, length in every])
        self.expect("following", following, self.bonus.tolist())
        # The KV slot of a step's input token is the one before the length that it made.
        self.expect("slots", part.out_cache_loc, [100 * i + length - 1 for i, length in every])
        self.expect("lengths", (part.extend_lens, part.seq_lens.tolist()), (self.counts, self.lens))
        self.expect("prefixes", part.prefix_lens, [a - b for a, b in zip(self.lens, self.counts, strict=True)])
        for name in OF_A_PROMPT:
            self.expect(name, getattr(part, name), None)
        return "drafts"

    def decode(self, part: SimpleNamespace, result: Any) -> None:
        for i, count in enumerate(self.counts):
            rows = slice(WIDTH * i, WIDTH * i + count)
            past = list(self.steps_of(i))
            after = [1000 * i + length for length in past[1:]] + [int(self.bonus[i])]
            self.expect("input", result.next_token_ids[rows], after)
            self.expect("hidden states", result.logits_output.hidden_states[rows, 1], [float(one) for one in past])
            self.expect("slots", part.out_cache_loc[rows], [100 * i + length - 1 for length in past])
        self.expect("accepted", result.accept_lens, self.counts)


def wrong_at_once() -> list[str]:
    resumed = Resumed(mrope=False)
    resumed.expect("drafts", resumed.batch.spec_info, "drafts")
    resumed.expect("of the batch itself", resumed.batch.multimodal_inputs, "of a prompt")
    return resumed.wrong


def held_by_a_batch_that_speculates() -> int:
    """Steps whose requests are still held, where the last plain batch has ended and another one speculates."""
    kept = empty(300)
    plain = decoder(kept, random.Random(0))  # noqa: S311
    plain.threshold = 2
    plain.forward(step([object()], [1], [1]))
    batch = SimpleNamespace(
        reqs=[object()], spec_algorithm=SpeculativeAlgorithm.EAGLE3, prepare_for_decode=lambda: None
    )
    plain.prepare_for_decode(batch, None)
    return len(kept.rows.steps)


def main() -> None:
    found = [drive(seed) for seed in range(10)]
    said = {
        "right": sum(right for right, _ in found),
        "wrong": sum(wrong for _, wrong in found),
        "read at once": wrong_at_once(),
        "read like accepted drafts": Resumed(mrope=True).wrong,
        "held": held_by_a_batch_that_speculates(),
    }
    print(json.dumps(said))  # noqa: T201 - its output


if __name__ == "__main__":
    main()
