"""Put known load on a lab server and check every token that comes back."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sgdiag.lab.client import Client, Generation
from sgdiag.lab.errors import LabError
from sgdiag.lab.state import Lab

MAX_CONCURRENCY = 256
MAX_SECONDS = 3600.0
MAX_NEW_TOKENS = 4096
PROMPT_TOKENS = (4, 32)
REQUEST_LIMIT_S = 300.0
_FIRST_ORDINARY_TOKEN = 2


class LoadResult(msgspec.Struct, frozen=True):
    """What a load came to. Latencies are of whole requests, in seconds; 0.0 when none was done.

    `wrong_tokens` counts tokens that differ from what the target model must say: anything but 0 is a bug.
    `accept_length` is tokens per verify step, None without speculation. `errors` holds the first few texts.
    """

    requests: int
    failed: int
    tokens: int
    wrong_tokens: int
    seconds: float
    tokens_per_s: float
    latency_p50_s: float
    latency_p90_s: float
    latency_p99_s: float
    accept_length: float | None
    interrupted: bool
    errors: tuple[str, ...]


class OutputCheck(msgspec.Struct, frozen=True):
    """One generation against what it must be; `accept_length` is tokens per verify step, None without speculation."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    expected: tuple[int, ...]
    wrong_tokens: int
    accept_length: float | None


def expected_tokens(successors: Sequence[int], last: int, count: int) -> tuple[int, ...]:
    """The only right greedy output: `count` tokens after the prompt's last one, along the successor table."""
    tokens = []
    for _ in range(count):
        last = successors[last]
        tokens.append(last)
    return tuple(tokens)


def count_wrong(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Positions that differ; missing and surplus tokens count as wrong."""
    differing = sum(1 for a, b in zip(tokens, expected, strict=False) if a != b)
    return differing + abs(len(tokens) - len(expected))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of values in any order; 0.0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def successors(lab: Lab) -> tuple[int, ...]:
    """The successor table of the lab's target model: index a token, get the one that follows."""
    file = Path(lab.models) / "expected_next.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[int, ...])
    except (OSError, msgspec.DecodeError):
        raise LabError(f"cannot read {file}; end the lab and start it again") from None


def check_output(
    lab: Lab, prompt: Sequence[int] = (2, 3, 4, 5), max_new_tokens: int = 16, limit_s: float = REQUEST_LIMIT_S
) -> OutputCheck:
    """Generate once and compare with the only right answer."""
    table = successors(lab)
    _check_prompt(prompt, table)
    client = Client(lab)
    try:
        generation = client.generate(prompt, max_new_tokens, limit_s)
    finally:
        client.close()
    expected = expected_tokens(table, prompt[-1], max_new_tokens)
    steps = generation.verify_count
    return OutputCheck(
        prompt=generation.prompt,
        tokens=generation.tokens,
        expected=expected,
        wrong_tokens=count_wrong(generation.tokens, expected),
        accept_length=len(generation.tokens) / steps if steps else None,
    )


def run(
    lab: Lab,
    concurrency: int = 8,
    max_new_tokens: int = 128,
    *,
    requests: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    ignore_eos: bool = True,
    stop: threading.Event | None = None,
) -> LoadResult:
    """Keep `concurrency` requests in flight until `requests` are done or `seconds` are over, whichever is first.

    Without either limit it runs for 20 seconds. Requests in flight at the end are waited for and counted. Ctrl-C or
    `stop` ends it early with what was done so far. LabError for numbers out of range, or when no request succeeded.

    SGLang admits requests that ignore the end token only where all their tokens fit. Without `ignore_eos` it estimates
    how many will be needed, and retracts where that was too few; these models never say the end token either way.
    """
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise LabError(f"concurrency {concurrency} is out of range; give 1 to {MAX_CONCURRENCY}")
    if not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
        raise LabError(f"max-new-tokens {max_new_tokens} is out of range; give 1 to {MAX_NEW_TOKENS}")
    if requests is not None and requests < 1:
        raise LabError(f"requests {requests} is out of range; give 1 or more")
    if seconds is None:
        seconds = MAX_SECONDS if requests is not None else 20.0
    if not 0 < seconds <= MAX_SECONDS:
        raise LabError(f"seconds {seconds:g} is out of range; give more than 0, at most {MAX_SECONDS:.0f}")
    stop = stop or threading.Event()
    return _Run(lab, concurrency, max_new_tokens, requests, seconds, seed, ignore_eos, stop).result()


def _check_prompt(prompt: Sequence[int], table: Sequence[int]) -> None:
    if not prompt or not all(0 <= token < len(table) for token in prompt):
        raise LabError(f"a prompt is one or more token ids below {len(table)}, not {list(prompt)[:8]}")


class _Run:
    """One load: threads that share a budget of requests and a deadline."""

    def __init__(
        self,
        lab: Lab,
        concurrency: int,
        max_new_tokens: int,
        requests: int | None,
        seconds: float,
        seed: int,
        ignore_eos: bool,
        stop: threading.Event,
    ) -> None:
        self._lab = lab
        self._table = successors(lab)
        self._client = Client(lab, concurrency)
        self._concurrency = concurrency
        self._max_new_tokens = max_new_tokens
        self._budget = requests
        self._seconds = seconds
        self._random = random.Random(seed)  # noqa: S311 - reproducible prompts, no secret
        self._ignore_eos = ignore_eos
        self._stop = stop
        self._lock = threading.Lock()
        self._done: list[tuple[float, Generation]] = []
        self._errors: list[str] = []
        self._deadline = 0.0

    def result(self) -> LoadResult:
        started = time.monotonic()
        self._deadline = started + self._seconds
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._concurrency)]
        interrupted = False
        try:
            for thread in threads:
                thread.start()
            limit = self._deadline + REQUEST_LIMIT_S
            while any(thread.is_alive() for thread in threads) and time.monotonic() < limit:
                if self._stop.wait(0.05):
                    interrupted = True
                    break
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._stop.set()
            self._client.close()
        return self._summary(time.monotonic() - started, interrupted)

    def _next_prompt(self) -> tuple[int, ...] | None:
        """A new prompt, or None when this load is over."""
        with self._lock:
            if self._stop.is_set() or time.monotonic() >= self._deadline or self._budget == 0:
                return None
            if self._budget is not None:
                self._budget -= 1
            length = self._random.randint(*PROMPT_TOKENS)
            return tuple(self._random.randrange(_FIRST_ORDINARY_TOKEN, len(self._table)) for _ in range(length))

    def _work(self) -> None:
        while (prompt := self._next_prompt()) is not None:
            started = time.monotonic()
            try:
                generation = self._client.generate(
                    prompt, self._max_new_tokens, REQUEST_LIMIT_S, ignore_eos=self._ignore_eos
                )
            except LabError as error:
                with self._lock:
                    self._errors.append(str(error))
                # A server that refuses at once must not be asked thousands of times a second.
                self._stop.wait(0.5)
                continue
            with self._lock:
                self._done.append((time.monotonic() - started, generation))

    def _summary(self, seconds: float, interrupted: bool) -> LoadResult:
        with self._lock:
            done, errors = list(self._done), list(self._errors)
        if not done and errors and not interrupted:
            raise LabError(errors[0])
        return summarise(done, self._table, self._max_new_tokens, seconds, interrupted, errors)


def summarise(
    done: Sequence[tuple[float, Generation]],
    table: Sequence[int],
    max_new_tokens: int,
    seconds: float,
    interrupted: bool = False,
    errors: Sequence[str] = (),
) -> LoadResult:
    """Sum up requests given as (latency in seconds, generation)."""
    latencies = [latency for latency, _ in done]
    tokens = sum(len(generation.tokens) for _, generation in done)
    steps = sum(generation.verify_count or 0 for _, generation in done)
    wrong = sum(
        count_wrong(generation.tokens, expected_tokens(table, generation.prompt[-1], max_new_tokens))
        for _, generation in done
    )
    return LoadResult(
        requests=len(done),
        failed=len(errors),
        tokens=tokens,
        wrong_tokens=wrong,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        latency_p50_s=percentile(latencies, 0.50),
        latency_p90_s=percentile(latencies, 0.90),
        latency_p99_s=percentile(latencies, 0.99),
        accept_length=tokens / steps if steps else None,
        interrupted=interrupted,
        errors=tuple(errors[:5]),
    )
