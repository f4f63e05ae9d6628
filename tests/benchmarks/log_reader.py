"""How fast the log reader is and how much memory it takes: ``python tests/benchmarks/log_reader.py [MEGABYTES]``.

Writes a log of the given size (1000 by default) to a temporary folder: a start-up, then traffic in which access lines
dominate, as in the log of a server that has run for days. Reads it once as a stream and once through the source.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sgdiag.sources.serverlog import ServerLogSource, events_of

START_UP = """\
[{stamp}] server_args=ServerArgs(model_path='models/a', host='0.0.0.0', port=30000, tp_size=2, api_key='k')
[{stamp} TP0] Init torch distributed ends. elapsed=1.42 s, mem usage=0.61 GB
[{stamp} TP0] Load weight begin. avail mem=78.31 GB
[{stamp} TP0] Load weight end. elapsed=21.33 s, type=LlamaForCausalLM, avail mem=63.20 GB, mem usage=15.11 GB.
[{stamp} TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 402131, K size: 24.54 GB, V size: 24.54 GB
[{stamp} TP0] Memory pool end. avail mem=13.70 GB
[{stamp} TP0] max_total_num_tokens=402131, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=2048, context_len=8192, available_gpu_mem=12.90 GB
[{stamp}] The server is fired up and ready to roll!
"""
ACCESS = '[{stamp}] INFO:     10.1.{a}.{b}:{port} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
PREFILL = (
    "[{stamp} TP0] Prefill batch, #new-seq: 2, #new-token: {a}, #cached-token: {b}, token usage: 0.31, "
    "#running-req: {c}, #queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): 9120.44\n"
)
DECODE = (
    "[{stamp} TP0] Decode batch, #running-req: {c}, #token: {port}, token usage: 0.33, accept len: 2.71, "
    "accept rate: 0.57, cuda graph: True, gen throughput (token/s): 1841.07, #queue-req: {b}\n"
)
OTHER = "[{stamp} TP0] Tree cache flushed after {a} requests took longer than a while on the way\n"


def traffic() -> Iterator[str]:
    for number in itertools.count():
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1_760_000_000 + number // 40))
        fields = {"stamp": stamp, "a": number % 251, "b": number % 97, "c": number % 61, "port": 30000 + number % 30000}
        if number == 0:
            yield START_UP.format(**fields)
        kind = {0: PREFILL, 7: DECODE, 13: OTHER}.get(number % 20, ACCESS)
        yield kind.format(**fields)


def write_log(path: Path, size_bytes: int) -> None:
    block = "".join(itertools.islice(traffic(), 20_000)).encode()
    with path.open("wb") as log:
        while log.tell() < size_bytes:
            log.write(block)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", type=int, nargs="?", default=1000)
    size = parser.parse_args().megabytes * 1_000_000
    say = sys.stdout.write
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        write_log(log, size)
        before = peak_mb()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        with log.open("rb") as stream:
            events = sum(1 for _ in events_of(stream))
        speed = size / 1e6 / (time.perf_counter() - begun)
        cpu = size / 1e6 / (time.process_time() - begun_cpu)
        say(
            f"stream: {events} events, {speed:.0f} MB/s ({cpu:.0f} MB per second of CPU time), "
            f"peak memory {peak_mb():.0f} MB (before: {before:.0f})\n"
        )
        source, first, longest, reads = ServerLogSource(log), 0.0, 0.0, 0
        begun = time.perf_counter()
        while True:
            started = time.perf_counter()
            snapshot = source.read()
            longest, reads = max(longest, time.perf_counter() - started), reads + 1
            first = first or time.perf_counter() - begun
            if snapshot.log.lines_read.or_else(0):
                break
        took = time.perf_counter() - begun
        source.close()
        say(
            f"source: first facts after {first:.2f} s, caught up after {took:.1f} s in {reads} reads "
            f"(longest {longest:.2f} s), peak memory {peak_mb():.0f} MB\n"
        )


if __name__ == "__main__":
    main()
