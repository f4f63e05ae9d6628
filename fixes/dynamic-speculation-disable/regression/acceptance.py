"""What acceptance does after speculation resumes: several ways to stop it, on the CPU lab, counted in verify steps.

    SGDIAG_FIX_ROOT=PATCHED SGDIAG_FIX_RELEASE=0.5.23 python acceptance.py [--gaps 32 128] [--windows 16 32 64 128 256]
                                                                           [--ways always zero cold ours]

One long request for each distance of `make_distance_models.py` speculates; one more request stops speculation while it
runs, for a known number of steps, and ends; then the steps are counted that each long request takes for its next
tokens. Every token is checked. Prints a Markdown table per gap.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sgdiag import lab
from sgdiag.lab import build, home, loading
from sgdiag.lab.releases import RELEASES
from sgdiag.lab.state import Lab

MAKE_MODELS = Path(__file__).with_name("make_distance_models.py")
# The draft reads tokens in its cache at the first four, hidden states of the target at the others.
DISTANCES = (1, 4, 16, 64, 8, 32, 128, 256)
FIRST_TOKEN_ID, LAST_TOKEN_ID = 2, 511
THRESHOLD = len(DISTANCES)  # of running requests: the long ones speculate, one more stops it
DRAFT_STEPS = 3
HEAD_START = 16  # tokens of every long request before speculation stops
WARM_UP_PROMPTS, WARM_UP_TOKENS = 16, 300
POOL_TOKENS = 6144  # enough for all long requests, and the warm-up leaves something in most of them
REQUEST_LIMIT_S = 1200.0

WAYS = {
    "always": "always on",
    "zero": "step of zero",
    "cold": "with the variable",
    "ours": "this fix",
}


def prompt(which: int, length: int, chance: random.Random) -> list[int]:
    """Tokens of the class that the distance of this index is looked up for."""
    count = (LAST_TOKEN_ID - FIRST_TOKEN_ID - which) // len(DISTANCES) + 1
    return [FIRST_TOKEN_ID + which + len(DISTANCES) * chance.randrange(count) for _ in range(length)]


def expected(table: Sequence[int], given: Sequence[int], distance: int, count: int) -> list[int]:
    """The target's only right continuation."""
    tokens = list(given)
    for _ in range(count):
        tokens.append(table[tokens[-1 - distance]])
    return tokens[len(given) :]


@dataclass
class Stream:
    """One request: when how many of its tokens had arrived, step by step, the tokens, and what came with the last."""

    chunks: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def steps(self) -> list[tuple[float, int]]:
        """When each step after the first ended, and how many tokens it made."""
        return [(when, n1 - n0) for (_, n0), (when, n1) in itertools.pairwise(self.chunks)]


def after_resume(streams: Sequence[Stream], alone: float) -> list[list[int]]:
    """Tokens of each step since speculation resumed: since one of the streams accepted a draft after that moment.

    RuntimeError where a chunk holds more than one step.
    """
    if any(made > DRAFT_STEPS + 1 for one in streams for _, made in one.steps()):
        raise RuntimeError("this machine is too busy: chunks of two steps came as one")
    resumed = min(when for one in streams for when, made in one.steps() if when > alone and made > 1)
    found = []
    for one in streams:
        # Of each stream the chunk that came with this one.
        first = min(range(len(one.steps())), key=lambda i: abs(one.steps()[i][0] - resumed))
        found.append([made for _, made in one.steps()[first:]])
    return found


def accept_lengths(steps: Sequence[int], ends: Sequence[int]) -> list[float]:
    """Tokens per step in windows of tokens, each from the end of the one before; a step counts where it begins.

    NaN for a window that the steps do not fill.
    """
    made, windows = 0, [[0, 0] for _ in ends]
    for tokens in steps:
        window = next((i for i, end in enumerate(ends) if made < end), None)
        if window is None:
            break
        windows[window][0] += tokens
        windows[window][1] += 1
        made += tokens
    filled = [made >= end and counted > 0 for end, (_, counted) in zip(ends, windows, strict=True)]
    return [tokens / counted if full else math.nan for full, (tokens, counted) in zip(filled, windows, strict=True)]


def stream(port: int, given: Sequence[int], count: int, into: Stream, begun: threading.Semaphore | None = None) -> None:
    """Generate greedily; ``begun`` is released after HEAD_START tokens, or at the end."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = json.dumps({"input_ids": list(given), "stream": True, "sampling_params": sampling})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_LIMIT_S)
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            answer = json.loads(line[6:])
            into.meta = answer["meta_info"]
            into.chunks.append((time.monotonic(), into.meta["completion_tokens"]))
            new = answer["output_ids"]
            into.tokens = new if len(new) >= len(into.tokens) else into.tokens + new
            if begun is not None and len(into.tokens) >= HEAD_START:
                begun.release()
                begun = None
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        into.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        if begun is not None:
            begun.release()


def across_a_gap(target: Lab, gap: int, tokens: int, seed: int) -> tuple[list[Stream], float]:
    """One stream per distance, and when the request that stopped speculation for ``gap`` steps had ended.

    RuntimeError for a wrong token.
    """
    table = json.loads((Path(target.models) / "expected_next.json").read_text(encoding="utf-8"))
    chance = random.Random(seed)  # noqa: S311 - prompts, no secret
    # A long request must outlast its head start, the gap, and the steps until speculation resumes.
    count = tokens + gap + 8 * HEAD_START
    prompts = [prompt(which, distance + 2, chance) for which, distance in enumerate(DISTANCES)]
    streams, begun = [Stream() for _ in prompts], threading.Semaphore(0)
    threads = [
        threading.Thread(target=stream, args=(target.port, given, count, into, begun))
        for given, into in zip(prompts, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    crowd = Stream()
    stream(target.port, prompt(0, 4, chance), gap, crowd)
    alone = time.monotonic()
    for thread in threads:
        thread.join()
    for distance, given, into in zip(DISTANCES, prompts, streams, strict=True):
        if into.error or into.tokens != expected(table, given, distance, count):
            raise RuntimeError(f"distance {distance}: {into.error or 'a wrong token'}")
    return streams, alone


@contextmanager
def serving(way: str, root: Path, release: str, name: str, threshold: int = THRESHOLD) -> Iterator[Lab]:
    """A lab server of the patched package that stops speculation that way above the threshold."""
    with TemporaryDirectory() as folder:
        models, config = Path(folder, "models"), Path(folder, "adaptive.json")
        words = [str(home.base_python()), str(MAKE_MODELS), str(models), *map(str, DISTANCES)]
        subprocess.run(words, check=True, capture_output=True)
        steps = {"1": {"candidate_steps": [DRAFT_STEPS]}, str(threshold + 1): {"candidate_steps": [0]}}
        config.write_text(json.dumps(steps), encoding="utf-8")
        # Float32, so that all ways to compute the same come to the same token.
        arguments = ["--dtype", "float32", "--max-running-requests", str(2 * THRESHOLD)]
        arguments += ["--max-total-tokens", str(POOL_TOKENS), "--disable-radix-cache"]
        if RELEASES[release].interpreted:
            arguments += ["--triton-attention-num-kv-splits", "1"]
        environment = {"PYTHONPATH": os.pathsep.join(map(str, (root, home.overlay_dir(release), home.shims_dir())))}
        if way == "ours":
            arguments += ["--speculative-disable-batch-threshold", str(threshold)]
        elif way in ("zero", "cold"):
            arguments += ["--speculative-adaptive", "--speculative-adaptive-config", str(config)]
        if way == "cold":
            environment["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] = "1"
        with (
            mock.patch.object(build, "models", lambda *_: models),
            # The lab would compare the first tokens with a table that has one successor for each token.
            mock.patch.object(loading, "check_output", lambda *_, **__: SimpleNamespace(wrong_tokens=0)),
        ):
            target = lab.up(release, speculative=True, name=name, extra_args=arguments, env=environment)
        try:
            yield target
        finally:
            lab.down(name)


def warm_up(target: Lab) -> None:
    """Leave keys and values of other requests in most of the pools, as on a server that has served before."""
    chance = random.Random(0)  # noqa: S311
    for which in range(WARM_UP_PROMPTS):
        stream(target.port, prompt(which % len(DISTANCES), WARM_UP_TOKENS, chance), 2, Stream())


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance after speculation resumes, on the CPU lab.")
    parser.add_argument("--gaps", type=int, nargs="+", default=[32, 128], help="steps without speculation")
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="ends, in tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    root, release = Path(os.environ["SGDIAG_FIX_ROOT"]), os.environ["SGDIAG_FIX_RELEASE"]
    for way in args.ways:
        with serving(way, root, release, f"acceptance-{os.getpid()}") as target:
            warm_up(target)
            for gap in args.gaps:
                began = time.monotonic()
                found = after_resume(*across_a_gap(target, gap, args.windows[-1], seed=gap))
                for distance, one in sorted(zip(DISTANCES, found, strict=True), key=lambda pair: pair[0]):
                    lengths = accept_lengths(one, args.windows)
                    cells = " | ".join(f"{length:.2f}" for length in lengths)
                    sys.stdout.write(f"| {WAYS[way]} | {gap} | {distance} | {cells} |\n")
                sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")
                sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, lab.LabError) as error:
        sys.exit(f"acceptance: {error}")
