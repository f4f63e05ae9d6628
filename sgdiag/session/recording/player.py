"""Plays a recording: at any pace, in steps, from any moment on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sgdiag.model import Snapshot
from sgdiag.session.recording.lines import FRAMES_PER_MEMBER
from sgdiag.session.recording.reader import read_frames, read_header, read_index

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

BEFORE_A_JUMP = 120
"""Frames before the one that was jumped to which are read, too, so that the charts have a past."""

HOLD_END_S = 1.0
"""How long the last frame stays before a loop begins again."""


class ReplayFeed:
    """A recording played at its own pace times ``speed``, again from the start when ``loop`` is set.

    Times are in seconds since the first frame. Raises SgdiagError where the file is no recording, or, while playing,
    damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        speed: float = 1.0,
        loop: bool = False,
        start_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.header = read_header(path)
        self.title = self.header.title or path.name
        self.speed = speed
        self.paused = False
        self.loop = loop
        self._path = path
        self._clock = clock
        self._index = read_index(path)
        self._number = -1
        self._now = Snapshot()
        self._frames: Iterator[Snapshot] | None = None
        self._passed: list[Snapshot] = []
        self._begin(start_s)

    @property
    def length_s(self) -> float:
        return self._index.times[-1]

    @property
    def position_s(self) -> float:
        """The moment that is shown, which stops at the end."""
        return min(self._position(), self.length_s)

    @property
    def frame(self) -> int:
        """The number of the frame that is shown, from 0."""
        return self._number

    @property
    def frames(self) -> int:
        return len(self._index.times)

    @property
    def ended(self) -> bool:
        """Whether the last frame is shown and no other will be by itself."""
        return not self.loop and self._position() >= self.length_s

    def latest(self) -> Snapshot:
        position = self._position()
        if self.loop and position > self.length_s + HOLD_END_S:
            self._begin(0.0)
            position = 0.0
        self._go_to(self._index.at_or_before(position))
        return self._now

    def passed(self) -> list[Snapshot]:
        """The frames up to the one that is shown since the last call, for whoever draws the past."""
        passed, self._passed = self._passed, []
        return passed

    def pause(self) -> None:
        """Stops, or goes on; at the end it begins again."""
        if self.ended:
            self.paused = False
            self._begin(0.0)
            return
        position = self.position_s
        self.paused = not self.paused
        self._begin(position)

    def step(self, frames: int) -> None:
        """Stops at the frame that lies so many further on (or back)."""
        self.paused = True
        number = min(max(self._number + frames, 0), self.frames - 1)
        self._begin(self._index.times[number])
        self._go_to(number)

    def seek(self, seconds: float) -> None:
        """Goes on from another moment, so many seconds later (or earlier)."""
        self._begin(min(max(self.position_s + seconds, 0.0), self.length_s))

    def faster(self, steps: int) -> None:
        """The next higher speed, or with -1 the next lower one."""
        position = self.position_s
        others = [speed for speed in SPEEDS if (speed > self.speed if steps > 0 else speed < self.speed)]
        if others:
            self.speed = others[0] if steps > 0 else others[-1]
        self._begin(position)

    def close(self) -> None:
        self.paused, self.loop = True, False

    def _position(self) -> float:
        return self._from_s + (0.0 if self.paused else (self._clock() - self._begun) * self.speed)

    def _begin(self, position_s: float) -> None:
        self._from_s = position_s
        self._begun = self._clock()

    def _go_to(self, number: int) -> None:
        """Reads on as far as frame ``number``, or from a whole snapshot some way before it."""
        if number == self._number:
            return
        ahead = number - self._number
        if self._frames is None or not 0 < ahead <= BEFORE_A_JUMP + FRAMES_PER_MEMBER:
            first, place = self._index.start_of(max(number - BEFORE_A_JUMP, 0))
            self._frames = read_frames(self._path, place)
            self._number = first - 1
            self._passed.clear()
        while self._number < number and (following := next(self._frames, None)) is not None:
            self._now = following
            self._number += 1
            self._passed.append(following)
        # A caller that never asks for them must not make them pile up.
        del self._passed[: -BEFORE_A_JUMP - FRAMES_PER_MEMBER]
