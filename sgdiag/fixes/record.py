"""pip's list of a package's files (RECORD), kept true when files change."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Mapping


def updated(record: bytes, contents: Mapping[str, bytes | None]) -> bytes:
    """``record`` with the hashes and sizes of ``contents`` (by path from the folder that RECORD counts from; None: the
    file is not there). Lines of other files stay as they are, byte for byte."""
    left = dict(contents)
    lines: list[bytes] = []
    for line in record.splitlines(keepends=True):
        path = next(csv.reader([line.decode("utf-8", "replace")]), [""])[0]
        if path not in left:
            lines.append(line)
        elif (content := left.pop(path)) is not None:
            lines.append(_line(path, content))
    added = [_line(path, content) for path, content in left.items() if content is not None]
    if added and lines and not lines[-1].endswith((b"\n", b"\r")):
        lines.append(b"\n")
    return b"".join((*lines, *added))


def _line(path: str, content: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow((path, f"sha256={digest}", len(content)))
    return text.getvalue().encode()
