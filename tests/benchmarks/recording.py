"""What recording costs: CPU time and bytes for each frame, and how fast a recording is read again.

python -m tests.benchmarks.recording
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec

from sgdiag.model import RankId, Snapshot
from sgdiag.releases.redaction import Redactor
from sgdiag.resources import recording
from sgdiag.session.recording import Recorder, read_frames, read_index


def with_ranks(snapshot: Snapshot, ranks: int) -> Snapshot:
    """As many ranks as that, all like the first one."""
    alike = tuple(msgspec.structs.replace(snapshot.ranks[0], id=RankId(tp=tp)) for tp in range(ranks))
    return msgspec.structs.replace(snapshot, ranks=alike)


def main() -> None:
    film = list(read_frames(recording("demo.sgdiag")))
    print("ranks  redacted  write ms  bytes  read ms  index ms  (for each frame; index for all)")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 8, 64):
            frames = [with_ranks(snapshot, ranks) for snapshot in film]
            for redactor in (None, Redactor()):
                path = Path(folder) / f"{ranks}-{redactor is not None}.sgdiag"
                begun = time.process_time()
                with Recorder(path, redactor=redactor) as recorder:
                    for snapshot in frames:
                        recorder.write(snapshot)
                written = time.process_time()
                read_index(path)
                indexed = time.process_time()
                for _ in read_frames(path):
                    pass
                read = time.process_time()
                count = len(frames)
                print(
                    f"{ranks:5}  {'yes' if redactor else 'no':8}  {(written - begun) / count * 1e3:8.1f}"
                    f"  {path.stat().st_size // count:5}  {(read - indexed) / count * 1e3:7.2f}"
                    f"  {(indexed - written) * 1e3:8.1f}"
                )


if __name__ == "__main__":
    main()
