"""Measured layouts kept from run to run, and believed only if nobody else can have written them."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20
_KEY = re.compile(r"[A-Za-z0-9._-]{1,200}")


def default_directory() -> Path:
    """Under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "sgdiag" / "layouts"


class LayoutCache:
    """JSON documents by key in one directory. A cache that cannot be used is as good as an empty one."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory()

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key")
        return self._directory / f"{key}.json"

    @staticmethod
    def _is_ours(facts: os.stat_result) -> bool:
        return facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def load(self, key: str) -> Any | None:
        """The document, or None if there is none that can be trusted."""
        path = self._path(key)
        try:
            if not self._is_ours(self._directory.stat()):
                return None
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not (stat.S_ISREG(facts.st_mode) and self._is_ours(facts) and facts.st_size <= _MAX_BYTES):
                return None
            try:
                return json.loads(file.read(_MAX_BYTES))
            except (ValueError, RecursionError, OSError):
                return None

    def store(self, key: str, document: Any) -> bool:
        """Keep the document; a reader sees the old one or the new one, never half of it. False if it cannot be kept."""
        path = self._path(key)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours(self._directory.stat()):
                return False
            descriptor, beside = tempfile.mkstemp(dir=self._directory, prefix=".new-")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(document, file)
                Path(beside).replace(path)
            except BaseException:
                Path(beside).unlink(missing_ok=True)
                raise
        except OSError:
            return False
        return True
