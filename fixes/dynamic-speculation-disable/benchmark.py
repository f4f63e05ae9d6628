"""Decode throughput of several resident servers, driven in turn, every token checked.

    python benchmark.py --next expected_next.json plain=http://127.0.0.1:31000 ours=http://127.0.0.1:31010
                        [--concurrency 1 4 8 16 32 64] [--rounds 8] [--tokens 512] [--baseline plain] [--json OUT]

The servers serve a model whose greedy output follows a table: ``expected_next.json`` gives the token after each token.
Every round visits every server, every second one in reverse order, so that a slow spell of the machine meets all of
them. In one visit the requests start together; the decode rate is taken while all of them run, from the first token of
the last to start until the first is done. Give the servers ``--stream-interval 32``: the times of these chunks are the
clock, and few chunks keep the client out of the measurement. Give all servers the same cores. Prints a Markdown table
per baseline: the median over rounds in tokens/s, its ratio to the baseline as the median of the ratios within a round,
and the 95 % interval of that ratio by bootstrap. Standard library only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import statistics
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESAMPLES = 2000
REQUEST_LIMIT_S = 120.0
FEW_ROUNDS = 2
PROMPT_TOKENS = 16
FIRST_TOKEN_ID = 2  # the tokens below it begin and end a text


@dataclass
class Stream:
    """One request: when how many of its tokens had arrived, and what came last."""

    times: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def at(self, moment: float) -> float:
        """Tokens at a moment between the first and the last chunk, between two chunks in proportion."""
        for (t0, n0), (t1, n1) in zip(self.times, self.times[1:], strict=False):
            if t0 <= moment <= t1:
                return n0 + (n1 - n0) * (moment - t0) / (t1 - t0) if t1 > t0 else n1
        raise ValueError(f"{moment} is outside of the stream")


def request(url: str, prompt: Sequence[int], tokens: int, into: Stream) -> None:
    """Stream one greedy generation; parses after the end, so that the clock sees arrivals only."""
    parts = urllib.parse.urlsplit(url)
    body = json.dumps(
        {
            "input_ids": list(prompt),
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
    )
    arrived: list[tuple[float, bytes]] = []
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_LIMIT_S)
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        arrived.extend((time.perf_counter(), line) for line in answer if line.startswith(b"data: {"))
        chunks = [(when, json.loads(line[6:])) for when, line in arrived]
        into.times = [(when, int(chunk["meta_info"]["completion_tokens"])) for when, chunk in chunks]
        into.tokens = chunks[-1][1]["output_ids"]
        into.meta = chunks[-1][1]["meta_info"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        into.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def expected(following: Sequence[int], prompt: Sequence[int], tokens: int) -> list[int]:
    """The greedy continuation of ``prompt``."""
    made, last = [], prompt[-1]
    for _ in range(tokens):
        last = following[last]
        made.append(last)
    return made


def wrong(stream: Stream, right: Sequence[int]) -> str:
    """What is wrong with a finished stream in a few words, or nothing."""
    if stream.error:
        return stream.error
    # A server that streams increments sends the last part only.
    given = stream.tokens
    if len(given) == len(right):
        first = next((i for i, (a, b) in enumerate(zip(given, right, strict=True)) if a != b), None)
        return "" if first is None else f"token {first} is {given[first]}, not {right[first]}"
    return f"{len(given)} tokens, not {len(right)}"


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens/s of all streams together while all of them run; nan where they never all did."""
    begin = max(s.times[0][0] for s in streams)
    end = min(s.times[-1][0] for s in streams)
    if end <= begin:
        return float("nan")
    return sum(s.at(end) - s.at(begin) for s in streams) / (end - begin)


@dataclass
class Visit:
    decode: float  # tokens/s
    whole: float  # tokens/s, prefill and start included
    accept: float  # tokens per verify, nan without speculation
    errors: list[str]


def visit(url: str, following: Sequence[int], clients: Sequence[Sequence[int]], rng: random.Random) -> Visit:
    """Clients that start together; each makes its requests of these lengths (tokens) one after the other."""
    plans = [
        [([rng.randrange(FIRST_TOKEN_ID, len(following)) for _ in range(PROMPT_TOKENS)], length) for length in lengths]
        for lengths in clients
    ]
    streams = [[Stream() for _ in plan] for plan in plans]

    def work(plan: Sequence[tuple[list[int], int]], own: Sequence[Stream]) -> None:
        for (prompt, length), stream in zip(plan, own, strict=True):
            request(url, prompt, length, stream)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(plans, streams, strict=True)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = time.perf_counter()
    found = [
        wrong(stream, expected(following, prompt, length))
        for plan, own in zip(plans, streams, strict=True)
        for (prompt, length), stream in zip(plan, own, strict=True)
    ]
    errors = [text for text in found if text]
    if errors:
        return Visit(float("nan"), float("nan"), float("nan"), errors)
    every = [stream for own in streams for stream in own]
    accepted = [s.meta["spec_accept_length"] for s in every if s.meta.get("spec_accept_length")]
    return Visit(
        decode=decode_rate(every) if len(every) == len(clients) else float("nan"),
        whole=sum(map(sum, clients)) / (ended - begun),
        accept=statistics.mean(accepted) if accepted else float("nan"),
        errors=[],
    )


def interval(values: Sequence[float], rng: random.Random) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def summary(visits: dict[str, list[Visit]], baseline: str, rate: Callable[[Visit], float]) -> dict[str, Any]:
    """By server: median rate, ratio to the baseline and its interval. Rounds that failed on either are left out."""
    rng = random.Random(0)  # noqa: S311 - resampling, nothing secret
    result: dict[str, Any] = {}
    for name, own in visits.items():
        pairs = [
            (rate(mine), rate(other))
            for mine, other in zip(own, visits[baseline], strict=False)
            if not math.isnan(rate(mine)) and not math.isnan(rate(other))
        ]
        if not pairs:
            continue
        ratios = [mine / other for mine, other in pairs]
        low, high = interval(ratios, rng)
        accept = [v.accept for v in own if not math.isnan(v.accept)]
        result[name] = {
            "tokens_per_s": statistics.median(mine for mine, _ in pairs),
            "ratio": statistics.median(ratios),
            "low": low,
            "high": high,
            "rounds": [round(mine, 1) for mine, _ in pairs],
            "accept_length": statistics.median(accept) if accept else None,
        }
    return result


def table(results: dict[int, dict[str, Any]], names: Sequence[str], key: str) -> str:
    lines = ["| C | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for concurrency, found in results.items():
        cells = []
        for name in names:
            one = found[key].get(name)
            cells.append(
                f"{one['tokens_per_s']:.0f} ({one['ratio']:.3f}, {one['low']:.3f}-{one['high']:.3f})" if one else "-"
            )
        lines.append(f"| {concurrency} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def server(word: str) -> tuple[str, str]:
    name, mark, url = word.partition("=")
    if not mark or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=http://HOST:PORT")
    return name, url.rstrip("/")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("servers", nargs="+", type=server, metavar="NAME=URL")
    parser.add_argument("--next", required=True, type=Path, help="expected_next.json of the model")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--few", nargs="*", default=[], metavar="NAME", help="servers that two rounds are enough for")
    parser.add_argument("--tokens", type=int, default=512, help="per request")
    parser.add_argument("--baseline", nargs="*", metavar="NAME", help="compare with these; with the first by default")
    parser.add_argument("--limit-s", type=float, default=600.0, help="per concurrency: begin no round after that long")
    parser.add_argument("--ramp", action="store_true", help="requests of different lengths: the batch shrinks to one")
    parser.add_argument(
        "--in-turn", type=int, default=1, help="requests per client, up to --tokens each: prefills mixed in"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(
    given: argparse.Namespace, concurrency: int, following: Sequence[int]
) -> tuple[dict[str, list[Visit]], int]:
    """All visits at one concurrency, and how many requests were wrong or failed."""
    rng = random.Random(concurrency)  # noqa: S311 - prompts, nothing secret
    visits: dict[str, list[Visit]] = {name: [] for name, _ in given.servers}
    if given.ramp:
        clients = [[max(1, given.tokens * (i + 1) // concurrency)] for i in range(concurrency)]
    elif given.in_turn > 1:
        clients = [
            [rng.randint(given.tokens // 2, given.tokens) for _ in range(given.in_turn)] for _ in range(concurrency)
        ]
    else:
        clients = [[given.tokens]] * concurrency
    began, failures = time.monotonic(), 0
    # The first round meets cold caches and is not counted.
    for turn in range(given.rounds + 1):
        if turn > 2 and time.monotonic() - began > given.limit_s:
            break
        for name, url in given.servers[:: 1 if turn % 2 else -1]:
            if name in given.few and turn > FEW_ROUNDS:
                continue
            seen = visit(url, following, clients, rng)
            failures += len(seen.errors)
            for text in seen.errors[:2]:
                print(f"{name} at {concurrency}: {text}", flush=True)  # noqa: T201
            if turn > 0:
                visits[name].append(seen)
    return visits, failures


def main() -> int:
    given = options()
    names = [name for name, _ in given.servers]
    baselines = given.baseline or names[:1]
    unknown = [name for name in (*baselines, *given.few) if name not in names]
    if unknown:
        sys.exit(f"benchmark: no server is named {unknown[0]}")
    try:
        following = json.loads(given.next.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"benchmark: {error}")
    results: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in baselines}
    failures = 0
    for concurrency in given.concurrency:
        visits, wrong_here = measure(given, concurrency, following)
        failures += wrong_here
        for baseline in baselines:
            results[baseline][concurrency] = {
                "decode": summary(visits, baseline, lambda v: v.decode),
                "whole": summary(visits, baseline, lambda v: v.whole),
            }
        print(f"{concurrency} done", flush=True)  # noqa: T201
        if given.json:
            given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    for baseline in baselines:
        for key, title in (("decode", "Decode, all running"), ("whole", "Whole, prefill included")):
            if not any(at[key] for at in results[baseline].values()):
                continue
            print(f"\n{title}: tokens/s (ratio to {baseline}, 95 %)\n")  # noqa: T201
            print(table(results[baseline], names, key))  # noqa: T201
    print("\naccept length:", accept_lengths(results[baselines[0]]))  # noqa: T201
    print(f"wrong or failed requests: {failures}")  # noqa: T201
    return 1 if failures else 0


def accept_lengths(results: dict[int, dict[str, Any]]) -> dict[str, list[float]]:
    """By server the median at each concurrency; servers that do not speculate are left out."""
    found: dict[str, list[float]] = {}
    for at in results.values():
        for name, one in at["whole"].items():
            if one["accept_length"] is not None:
                found.setdefault(name, []).append(round(one["accept_length"], 2))
    return found


if __name__ == "__main__":
    sys.exit(main())
