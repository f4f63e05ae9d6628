"""How long a post-mortem takes: ``python tests/benchmarks/explain.py [MEGABYTES]``.

Writes a log of 250 KB and one of the given size (1000 by default) to a temporary folder, the traffic of
``log_reader.py`` with a death at its end, and explains each in a process of its own, as `sgdiag explain` does. Then
smaller logs of which no two lines are alike: where each says that it repeats what a user sent, and where none does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.benchmarks.log_reader import START_UP, write_log

DEATH = b"""\
[2026-03-01 10:00:21 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 900
[2026-03-01 10:00:21 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/managers/scheduler.py", line 12, in event_loop_overlap
    batch_result = self.run_batch(batch)
  File "/opt/sglang/srt/layers/logits_processor.py", line 99, in forward
    logits = self._get_logits(pruned_states)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.63 GiB. GPU 0 has a total capacity of 79.11 GiB of \
which 1.61 GiB is free.
"""


WORDS = ("apple", "river", "stone", "cloud", "paper", "green", "harbour", "meadow", "copper", "velvet", "quiet")
QUOTED = "[2026-03-01 10:00:20] Receive: obj=GenerateReqInput(text='{}')\n"
PLAIN = "{}\n"


def write_words(path: Path, size_bytes: int, line: str) -> None:
    """A start, then ``line`` with 2000 characters of words at random in each; by none of them failures are known."""
    random = Random(1)  # noqa: S311
    with path.open("w", encoding="utf-8") as log:
        log.write(START_UP.format(stamp="2026-03-01 10:00:00"))
        while log.tell() < size_bytes:
            log.write(line.format(" ".join(random.choices(WORDS, k=400))[:2000]))


def explained(path: Path) -> tuple[float, float]:
    """Seconds and peak MiB of one `sgdiag explain`."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "sgdiag", "explain", str(path)], stdout=subprocess.DEVNULL) as child:
        _, _, usage = os.wait4(child.pid, 0)
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", nargs="?", type=int, default=1000)
    size = parser.parse_args().megabytes
    bare = min(_bare() for _ in range(5))
    print(f"interpreter's start: {bare * 1000:.0f} ms")
    with tempfile.TemporaryDirectory() as folder:
        for name, size_bytes, times in (("250 KB", 250_000, 5), (f"{size} MB", size * 1_000_000, 1)):
            log = Path(folder, "server.log")
            write_log(log, size_bytes)
            with log.open("r+b") as stream:
                stream.truncate(size_bytes)
                stream.seek(0, os.SEEK_END)
                stream.write(b"\n" + DEATH)
            seconds, peak = min(explained(log) for _ in range(times))
            print(f"{name}: {seconds:.2f} s ({(seconds - bare) * 1000:.0f} ms beyond the start), peak {peak:.0f} MiB")
        for name, line, megabytes in (("users' words", QUOTED, size / 10), ("any words", PLAIN, size / 100)):
            log = Path(folder, "words.log")
            took_s = []
            for size_bytes in (0, int(megabytes * 1e6)):
                write_words(log, size_bytes, line)
                with log.open("ab") as stream:
                    stream.write(DEATH)
                took_s.append(min(explained(log)[0] for _ in range(3)))
            print(f"{name}: {megabytes / (took_s[1] - took_s[0]):.1f} MB/s")


def _bare() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
