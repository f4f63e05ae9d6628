"""Decode throughput of servers that are resident on the same GPUs and take turns of a fraction of a second.

    python -m tests.benchmarks.throughput --next expected_next.json plain=URL patched=URL --pairs patched/plain
        [--concurrency 1 4 8 16 32 64] [--seconds 60] [--half-width 0.01] [--cores 2,3,4,5] [--json FILE]

Each server gets the same long requests, which run all the time; every scheduler but one is stopped by SIGSTOP, in an
order that goes there and back. So no client takes part in the measurement, servers are compared within a second, and a
slow spell of the machine meets all of them. Steps are counted in the scheduler's memory while it runs, after the turn's
first moments, and tokens while it stands still, both exactly. Requests that get near their end are aborted on all
servers at once, checked token by token, and replaced. Per pair: the median of the ratio over rounds, and its 95 %
interval by resampling rounds. For each concurrency it ends when all pairs' intervals are as narrow as asked for, or
after so many seconds.

The servers run on this host, without other load. Servers whose ranks wait for each other are paused between two steps
before they are stopped, through /pause_generation.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from sgdiag.model import SgdiagError
from sgdiag.remote import RemoteError
from tests.benchmarks import turns
from tests.benchmarks.held_server import HeldServer, pin, work_between
from tests.benchmarks.steady_load import Batch, Request, count_word, positive_word, random_prompt, read_table
from tests.benchmarks.turns import Ratio, Round, Speed, Turn

START_LIMIT_S = 60.0
FEW_ROUNDS = 12
"""An interval out of fewer rounds is not trusted to be narrow."""

FAULTS_SHOWN = 3
PAIRS_HELP = "NAME+NAME/NAME+NAME for servers of the same code; by default all with the first"


class Pair(msgspec.Struct, frozen=True):
    """Servers of one kind, and those that they are compared with."""

    names: tuple[str, ...]
    to: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'+'.join(self.names)}/{'+'.join(self.to)}"


class Result(msgspec.Struct, frozen=True):
    """What one concurrency came to; ``spoilt`` counts rounds in which a batch changed."""

    concurrency: int
    speeds: dict[str, Speed]
    ratios: dict[str, Ratio]
    spoilt: int
    seconds: float
    rounds: list[Round]


class Course:
    """One concurrency: generations of requests, rounds of turns within each."""

    def __init__(self, given: argparse.Namespace, servers: Sequence[HeldServer], concurrency: int) -> None:
        self._given = given
        self._servers = {server.name: server for server in servers}
        self._concurrency = concurrency
        self._chance = random.Random(concurrency)  # noqa: S311 - prompts, nothing secret
        self._longest_round = 0
        self.rounds: list[Round] = []
        self.spoilt = 0
        self.faults: list[str] = []

    def run(self) -> None:
        ends = time.monotonic() + self._given.seconds
        while time.monotonic() < ends and not self.is_narrow() and not self.faults:
            with self._generation():
                if not self._has_room():
                    sys.exit(f"--tokens {self._given.tokens} is too few for a round; give more")
                while time.monotonic() < ends and self._has_room() and self._round():
                    pass

    def is_narrow(self) -> bool:
        return len(self.rounds) >= FEW_ROUNDS and all(
            turns.ratio(self.rounds, pair.names, pair.to).half_width <= self._given.half_width
            for pair in self._given.pairs
        )

    @contextmanager
    def _generation(self) -> Iterator[None]:
        """Equal requests on all servers, all of them running and held; aborted and checked afterwards."""
        prompts = [random_prompt(self._given.table, self._chance) for _ in range(self._concurrency)]
        requests = [Request(prompt, self._given.tokens) for prompt in prompts]
        # However this ends, and whatever fails at one of them, every server goes on and is rid of these requests.
        with ExitStack() as ends:
            for server in self._servers.values():
                batch = Batch(server.client, requests)
                ends.callback(self._end, server, batch)
                self._until_running(server, batch)
                server.hold()
            yield

    def _end(self, server: HeldServer, batch: Batch) -> None:
        server.release()
        self.faults += [f"{server.name} at {self._concurrency}: {text}" for text in batch.end(self._given.table)]

    def _until_running(self, server: HeldServer, batch: Batch) -> None:
        ends = time.monotonic() + START_LIMIT_S
        while server.running() < self._concurrency:
            if batch.ended or time.monotonic() > ends:
                sys.exit(f"{server.name} does not run {self._concurrency} requests of {self._given.tokens} tokens")
            time.sleep(0.001)

    def _has_room(self) -> bool:
        longest = max(max(server.look().lengths, default=0) for server in self._servers.values())
        room: int = self._given.tokens - longest
        return room > 1.5 * self._longest_round

    def _round(self) -> bool:
        """Whether no batch changed in it."""
        found: dict[str, list[Turn]] = {name: [] for name in self._servers}
        gains = dict.fromkeys(self._servers, 0.0)
        for name in turns.there_and_back(list(self._servers), len(self.rounds)):
            turn = self._turn(self._servers[name])
            if turn is None:
                self.spoilt += 1
                return False
            found[name].append(turn)
            gains[name] += turn.all_tokens / self._concurrency
        self._longest_round = max(self._longest_round, *map(int, gains.values()))
        self.rounds.append(found)
        return True

    def _turn(self, server: HeldServer) -> Turn | None:
        before = server.look()
        server.release()
        time.sleep(self._given.lead_ms / 1e3)
        first, begun = server.steps(), self._clock(server)
        time.sleep(self._given.turn_ms / 1e3)
        last, ended = server.steps(), self._clock(server)
        server.hold()
        work = work_between(before, server.look())
        return None if work is None or last == first else Turn(last - first, ended - begun, *work)

    def _clock(self, server: HeldServer) -> float:
        return time.perf_counter() - (server.waited_s() if self._given.own_time else 0.0)


def measure(given: argparse.Namespace, servers: Sequence[HeldServer], concurrency: int) -> Result:
    """Exits with one line where a server cannot take part, or says something wrong."""
    begun = time.monotonic()
    course = Course(given, servers, concurrency)
    course.run()
    if course.faults:
        sys.exit("\n".join([*course.faults[:FAULTS_SHOWN], f"{len(course.faults)} requests were wrong or failed"]))
    if not course.rounds:
        sys.exit(f"no round at {concurrency} was completed: {course.spoilt} spoilt; give more --tokens or --seconds")
    return Result(
        concurrency=concurrency,
        speeds={server.name: turns.speed(course.rounds, server.name) for server in servers},
        ratios={str(pair): turns.ratio(course.rounds, pair.names, pair.to) for pair in given.pairs},
        spoilt=course.spoilt,
        seconds=round(time.monotonic() - begun, 1),
        rounds=course.rounds,
    )


def table(results: Sequence[Result]) -> str:
    """Markdown, a row for each concurrency."""
    names, pairs = list(results[0].speeds), list(results[0].ratios)
    heads = ["C", *(f"{name}: tokens/s, ms/step, tokens/step" for name in names), *pairs, "rounds"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for result in results:
        speeds = [result.speeds[name] for name in names]
        ratios = [result.ratios[pair] for pair in pairs]
        cells = [
            str(result.concurrency),
            *(f"{one.tokens_per_s:.0f}, {one.step_ms:.3f}, {one.tokens_per_step:.2f}" for one in speeds),
            *(f"{one.median:.3f} ({one.low:.3f}-{one.high:.3f})" for one in ratios),
            f"{len(result.rounds)}" + (f", {result.spoilt} spoilt" if result.spoilt else ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def server_word(word: str) -> tuple[str, str]:
    name, mark, url = word.partition("=")
    if not name or not mark or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=http://HOST:PORT")
    return name, url


def pair_word(word: str) -> Pair:
    names, to = (tuple(side.split("+")) for side in word.partition("/")[::2])
    if "" in names + to or len(set(names + to)) < len(names + to):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME/NAME, nor NAME+NAME/NAME+NAME")
    return Pair(names, to)


def cores_word(word: str) -> list[int]:
    try:
        return [int(core) for core in word.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a list of cores as in 2,3,4") from None


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=server_word, metavar="NAME=URL")
    parser.add_argument("--next", required=True, type=Path, help="expected_next.json of the model")
    parser.add_argument("--pairs", nargs="+", type=pair_word, metavar="NAME/NAME", help=PAIRS_HELP)
    parser.add_argument("--concurrency", nargs="+", type=count_word, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=count_word, default=2000, help="of each request, at most")
    parser.add_argument("--seconds", type=positive_word, default=60.0, help="at most, per concurrency")
    parser.add_argument("--half-width", type=float, default=0.01, help="of the intervals that are narrow enough")
    parser.add_argument("--turn-ms", type=positive_word, default=200.0)
    parser.add_argument("--lead-ms", type=positive_word, default=60.0, help="of a turn before anything counts")
    parser.add_argument("--cores", type=cores_word, metavar="N,N…", help="the schedulers' main threads first")
    parser.add_argument(
        "--own-time",
        action="store_true",
        help="leave out what a scheduler waits for a core: for a machine that others use",
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    names = [name for name, _ in given.servers]
    given.pairs = given.pairs or [Pair((name,), (names[0],)) for name in names[1:]]
    for name in (name for pair in given.pairs for name in pair.names + pair.to):
        if name not in names:
            parser.error(f"--pairs: no server is named {name}")
    if not given.pairs or len(set(names)) < len(names):
        parser.error("give two or more servers, each with a name of its own")
    return given


def main() -> None:
    given = options()
    given.table = read_table(given.next)
    # A server must not be left standing still, however this ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        servers = [HeldServer(name, url, max(given.concurrency)) for name, url in given.servers]
        if given.cores:
            pin(servers, given.cores)
        results = []
        for concurrency in given.concurrency:
            results.append(measure(given, servers, concurrency))
            print(table(results[-1:]).splitlines()[-1], f"{results[-1].seconds:.0f} s", flush=True)
            if given.json:
                given.json.write_bytes(msgspec.json.encode(results))
    except (SgdiagError, RemoteError, OSError) as error:
        sys.exit(str(error))
    print(f"\n{table(results)}\n\nall tokens were right")


if __name__ == "__main__":
    main()
