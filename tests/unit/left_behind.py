"""Real processes that look like SGLang's workers whose launcher is gone, for tests: nothing of SGLang runs in them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sgdiag.sources.procfs import ProcFs

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
LIMIT_S = 10.0


def until(test: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


class Init:
    """A program called ``tini`` that takes in orphans and never collects them, below it what ``argvs`` started.

    Each of ``argvs`` becomes a process of one session whose leader, the launcher, has exited. ``deaf`` processes ignore
    SIGTERM.
    """

    def __init__(self, folder: Path, argvs: Sequence[Sequence[str]], *, deaf: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tini, self._worker = folder / "tini", folder / "sglang::scheduler"
        shutil.copy("/bin/sleep", tini)
        shutil.copy("/bin/cat", self._worker)
        self._fifo = folder / "fifo"
        os.mkfifo(self._fifo)
        told, tell = os.pipe()
        forker = os.fork()
        if forker == 0:
            try:
                os.close(told)
                # The test itself must not be an ancestor: sgdiag leaves itself out of what it sees.
                if os.fork() == 0:
                    os.write(tell, f"{os.getpid()} ".encode())
                    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
                    self._launch(argvs, tell, deaf)
                    os.execv(tini, ["tini", "600"])  # noqa: S606 - its name is the point
            finally:
                os._exit(0)
        os.close(tell)
        os.waitpid(forker, 0)
        with os.fdopen(told) as pipe:
            self.pid, *workers = (int(word) for word in pipe.read().split())
        self.workers = tuple(workers)
        until(lambda: all(ProcFs().stat(pid).parent == self.pid for pid in self.workers))
        # The kernel gives a program its name some moments before its command line can be read.
        until(lambda: ProcFs().stat(self.pid).comm == "tini" and all(map(ProcFs().cmdline, (self.pid, *self.workers))))

    def _launch(self, argvs: Sequence[Sequence[str]], tell: int, deaf: bool) -> None:
        """The launcher: starts its workers, says their pids and is gone before anybody waits for it."""
        launcher = os.fork()
        if launcher:
            os.close(tell)
            os.waitpid(launcher, 0)
            return
        try:
            os.setsid()
            if deaf:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for argv in argvs:
                # `cat` waits for itself to write into it.
                waits = os.open(self._fifo, os.O_RDWR)
                child = subprocess.Popen(argv, executable=self._worker, stdin=waits, stdout=subprocess.DEVNULL)
                os.write(tell, f"{child.pid} ".encode())
        finally:
            os._exit(0)

    def close(self) -> None:
        """Ends all of it, and only it."""
        for pid in self.workers:
            with contextlib.suppress(OSError):
                if ProcFs().stat(pid).parent == self.pid:
                    os.kill(pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)
