"""What the terminal interface costs: run by hand, prints numbers, writes nothing.

    python tests/benchmarks/tui.py [COLUMNS LINES]

Starts the interface on a made-up server whose values change every second, in a pseudo-terminal of its own, and
prints the time to the first full screen, then memory and processor time at one redraw a second.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
WATCHED_S = 20


def main() -> None:
    columns, lines = (int(number) for number in sys.argv[1:3]) if len(sys.argv) > 2 else (120, 40)
    started = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", PYTHONPATH=str(ROOT))
        os.execv(sys.executable, [sys.executable, "-m", "tests.tui.example", "connected"])  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    read_until(terminal, b"EAGLE3", 20)
    print(f"first full screen   {time.monotonic() - started:.2f} s")
    process = psutil.Process(child)
    for key in "1234567890":
        os.write(terminal, key.encode())
        drain(terminal, 3)
        before, begun = process.cpu_times(), time.monotonic()
        sent = drain(terminal, WATCHED_S)
        after, took = process.cpu_times(), time.monotonic() - begun
        used = after.user + after.system - before.user - before.system
        print(
            f"screen {key}   processor {100 * used / took:.2f} %   to the terminal {sent / took:.0f} bytes/s"
            f"   memory {process.memory_info().rss / 2**20:.0f} MiB"
        )
    os.write(terminal, b"q")
    drain(terminal, 1)
    os.waitpid(child, 0)


def read_until(terminal: int, mark: bytes, limit_s: float) -> None:
    seen = b""
    deadline = time.monotonic() + limit_s
    while mark not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            seen += os.read(terminal, 65536)


def drain(terminal: int, seconds: float) -> int:
    """Reads what comes within ``seconds``; how many bytes it was."""
    sent = 0
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                sent += len(os.read(terminal, 65536))
            except OSError:
                return sent
    return sent


if __name__ == "__main__":
    main()
