"""Unix time from the log's stamps, which are local time somewhere: here, or in a container with another time zone."""

from __future__ import annotations

import math
import time

_QUARTER_HOUR_S = 900.0
_LARGEST_OFFSET_S = 14 * 3600.0
_SLACK_S = 60.0


class LogClock:
    """Learns how far the log's time zone is from UTC by watching the file grow: its last stamp is then its
    modification time. Until then the zone of this machine is assumed. No line is later than the last write."""

    def __init__(self) -> None:
        self._offset_s: float | None = None
        self._modified_at = 0.0
        self._size = -1

    def learn(self, newest_s: float | None, modified_at: float, size_bytes: int) -> None:
        """``newest_s``: the last stamp in the file, read as UTC; the file's modification time and size."""
        grew = 0 <= self._size < size_bytes
        self._size, self._modified_at = size_bytes, modified_at
        if newest_s is None or not grew:
            return
        # Time zones are multiples of a quarter of an hour apart.
        offset = round((modified_at - newest_s) / _QUARTER_HOUR_S) * _QUARTER_HOUR_S
        if abs(offset) <= _LARGEST_OFFSET_S and abs(modified_at - newest_s - offset) <= _SLACK_S:
            self._offset_s = offset

    def unix(self, local_s: float) -> float:
        """Unix time of a stamp read as UTC; the last write's for what is no time or lies behind it."""
        if not math.isfinite(local_s):
            return self._modified_at
        at = local_s + self._offset_s if self._offset_s is not None else _here(local_s)
        return at if at <= self._modified_at + _SLACK_S else self._modified_at


def _here(local_s: float) -> float:
    try:
        moment = time.gmtime(local_s)
        return time.mktime((*moment[:8], -1))
    except (OverflowError, OSError, ValueError):
        return math.inf
