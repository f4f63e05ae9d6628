"""The benchmark's ranks: one process for each GPU, in an interpreter that has torch."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from sgdiag.analysis.allreduce.measured import Bench, Virtual
from sgdiag.model import NcclLog, SgdiagError
from sgdiag.releases.nccl.logs import NcclLogReader
from sgdiag.resources import folder
from sgdiag.sources.installed import WITHOUT_CURRENT_FOLDER

RANKS = (8, 6, 4, 2)
"""Numbers of ranks that there are kernels for."""

_CHECK_TIMEOUT_S = 120.0
_END_S = 10.0
_MOST_ERRORS = 4000
_MOST_LOG_LINES = 100_000

_CHECK = (
    f"{WITHOUT_CURRENT_FOLDER}; import torch; "
    "print('yes' if torch.cuda.is_available() and torch.version.cuda else 'no')"
)


class _Line(msgspec.Struct):
    """What rank 0 prints."""

    note: str = ""
    result: Bench | None = None
    virtual: Virtual | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``problem``: why not all of it was measured; empty where all was. ``nccl``: what NCCL said of itself."""

    bench: Bench | None = None
    virtual: Virtual | None = None
    nccl: NcclLog | None = None
    problem: str = ""


def require_torch(python: str) -> None:
    """Raises SgdiagError where ``python`` has no torch that sees a GPU."""
    try:
        ran = subprocess.run(
            [python, "-c", _CHECK], capture_output=True, text=True, check=False, timeout=_CHECK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SgdiagError(f"{python} does not run: {error}", "name one that SGLang runs in: --python EXE") from error
    if ran.stdout.strip() != "yes":
        last = ran.stderr.strip().splitlines()[-1:] or ["its torch sees no GPU"]
        raise SgdiagError(f"{python} cannot use the GPUs: {last[0]}", "name one that SGLang runs in: --python EXE")


def run(
    python: str,
    gpus: Sequence[int],
    asked: dict[str, Any],
    *,
    limit_s: float,
    tell: Callable[[str], None] = lambda _line: None,
) -> Outcome:
    """One run with a rank on each of ``gpus`` (NVML's indices). ``asked`` is what ``pcie_allreduce.bench`` takes beside
    ranks and meeting point. After ``limit_s`` the ranks are ended, and what is known by then is given."""
    with tempfile.TemporaryDirectory(prefix="sgdiag-bench-") as place:
        environment = {
            **os.environ,
            # NVML counts GPUs by their PCI addresses.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder("kernels")), os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,ENV",
            "NCCL_DEBUG_FILE": f"{place}/nccl.%p",
        }
        common = {"ranks": len(gpus), "rendezvous": f"{place}/rendezvous", **asked}
        program = str(Path(shutil.which(python) or python).absolute())
        ranks = [_Rank(program, {"rank": rank, **common}, environment, Path(place)) for rank in range(len(gpus))]
        try:
            outcome = _watch(ranks, time.monotonic() + limit_s, limit_s, tell)
        finally:
            for rank in ranks:
                rank.end()
        return msgspec.structs.replace(outcome, nccl=_nccl_log(Path(place)))


class _Rank:
    """One process; its stderr goes to a file, so that it never waits for us."""

    def __init__(self, python: str, asked: dict[str, Any], environment: dict[str, str], place: Path) -> None:
        self.number: int = asked["rank"]
        self._errors = place / f"stderr.{self.number}"
        command = [python, "-m", "pcie_allreduce.bench", msgspec.json.encode(asked).decode()]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env=environment,
                # Python imports from where it starts, too, and that may be anybody's folder.
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        with self._errors.open("rb") as file:
            file.seek(max(self._errors.stat().st_size - _MOST_ERRORS, 0))
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _watch(ranks: list[_Rank], deadline: float, limit_s: float, tell: Callable[[str], None]) -> Outcome:
    lines: queue.Queue[bytes] = queue.Queue()
    for rank in ranks:
        threading.Thread(target=_drain, args=(rank.process.stdout, lines), daemon=True).start()
    outcome = Outcome()
    while True:
        outcome = _take(lines, outcome, tell)
        codes = [rank.process.poll() for rank in ranks]
        failed = next((rank for rank, code in zip(ranks, codes, strict=True) if code), None)
        if failed is not None:
            problem = f"rank {failed.number} ended with status {failed.process.returncode}: {failed.last_words()}"
            return msgspec.structs.replace(_take(lines, outcome, tell), problem=problem)
        if all(code == 0 for code in codes):
            return _take(lines, outcome, tell, wait_s=1.0)
        if time.monotonic() > deadline:
            return msgspec.structs.replace(outcome, problem=f"it was not done after {limit_s:.0f} s (--timeout)")


def _drain(stream: IO[bytes] | None, lines: queue.Queue[bytes]) -> None:
    # A closed pipe ends the thread.
    with contextlib.suppress(ValueError, OSError):
        for line in stream or ():
            lines.put(line)


def _take(lines: queue.Queue[bytes], outcome: Outcome, tell: Callable[[str], None], wait_s: float = 0.2) -> Outcome:
    """Everything that has been printed by now."""
    with contextlib.suppress(queue.Empty):
        while True:
            try:
                line = msgspec.json.decode(lines.get(timeout=wait_s), type=_Line)
            except msgspec.MsgspecError:
                continue
            if line.note:
                tell(line.note)
            if line.result is not None:
                outcome = msgspec.structs.replace(outcome, bench=line.result)
            if line.virtual is not None:
                outcome = msgspec.structs.replace(outcome, virtual=line.virtual)
    return outcome


def _nccl_log(place: Path) -> NcclLog | None:
    reader = NcclLogReader()
    for number, line in enumerate(_lines(place), 1):
        reader.feed(number, line)
    return reader.log()


def _lines(place: Path) -> Iterator[str]:
    for file in sorted(place.glob("nccl.*")):
        with file.open(encoding="utf-8", errors="replace") as stream:
            for number, line in enumerate(stream):
                if number >= _MOST_LOG_LINES:
                    break
                yield line
