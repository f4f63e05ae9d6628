"""Python tracebacks in a log, also those that a report quotes without their first line."""

from __future__ import annotations

import re
from collections import deque

from sgdiag.model import Frame

HEADER = "Traceback (most recent call last):"
HINTS = (b"Traceback (most recent", b'", line ')

KEPT_FRAMES = 64

_FRAME = re.compile(
    # Quotes are escaped where the traceback was taken out of JSON.
    r'\s*(?:File \\?")?(?P<file>[^"\s\\][^"]{0,500}?)\\?", line (?P<line>\d{1,7})(?:, in (?P<function>\S.{0,200}))?$'
)
_CHAINED = ("During handling of the above", "The above exception was")


class Traceback:
    """Collects the frames of one traceback, and of those that it is chained to.

    ``where`` is what introduced it, ``exception`` its last line so far (of a chain, the last one's).
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.exception = ""
        self._frames: deque[Frame] = deque(maxlen=KEPT_FRAMES)

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(self._frames)

    def add(self, message: str, *, stamped: bool) -> bool:
        """Takes the next message; False if it is none of this traceback's, which then is over."""
        if stamped:
            return False
        if not message.strip():
            return True
        if message.startswith(_CHAINED):
            self.exception = ""
            return True
        if self.exception:
            return False
        frame = _FRAME.match(message)
        if frame:
            self._frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or ""))
        elif message[:1] in " \t":
            self._code(message.strip())
        elif HEADER not in message:
            self.exception = message.strip()
        return True

    def _code(self, text: str) -> None:
        if self._frames and not self._frames[-1].code and text.strip("^~ "):
            last = self._frames[-1]
            self._frames[-1] = Frame(last.file, last.line, last.function, text[:300])


def begins(message: str) -> Traceback | None:
    """A traceback that ``message`` begins: by its header, or by a frame where the header is missing."""
    if HEADER in message:
        return Traceback(message.partition(HEADER)[0].strip(" :"))
    if _FRAME.match(message):
        headless = Traceback("")
        headless.add(message, stamped=False)
        return headless
    return None
