"""A few lab servers for a test session: made when asked for, reused when alike, ended together."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from sgdiag.lab import processes, releases, server
from sgdiag.lab.errors import LabError
from sgdiag.lab.state import Lab

Key = tuple[object, ...]


class LabPool:
    """Calling it gives a running server of that description; `with` ends all of them.

    At most `most` live at once: the one that was asked for longest ago makes room, so a test may hold that many
    together. `start` is `sgdiag.lab.up` or something like it.
    """

    def __init__(self, most: int = 2, prefix: str = "pool", start: Callable[..., Lab] = server.up) -> None:
        self._most = most
        self._prefix = prefix
        self._start = start
        self._labs: dict[Key, Lab] = {}
        self._count = 0

    def __call__(
        self,
        release: str = releases.NEWEST,
        *,
        speculative: bool = False,
        topk: int = 1,
        tp: int = 1,
        accept: float = 0.8,
        layers: int = 4,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        api_key: str | None = None,
    ) -> Lab:
        """A ready server; one that died since it was last asked for is started again. LabError as for `up`."""
        key = (release, speculative, topk, tp, accept, layers, tuple(extra_args), *sorted((env or {}).items()), api_key)
        known = self._labs.pop(key, None)
        if known is not None:
            if processes.launcher_alive(known):
                self._labs[key] = known
                return known
            self.end(known)
        while len(self._labs) >= self._most:
            self.end(next(iter(self._labs.values())))
        self._count += 1
        lab = self._start(
            release,
            speculative=speculative,
            topk=topk,
            tp=tp,
            accept=accept,
            layers=layers,
            extra_args=extra_args,
            env=env,
            api_key=api_key,
            name=f"{self._prefix}-{os.getpid()}-{self._count}",
        )
        self._labs[key] = lab
        return lab

    def end(self, lab: Lab) -> None:
        """End one server of the pool; nothing happens if somebody has ended it already."""
        self._labs = {key: known for key, known in self._labs.items() if known.name != lab.name}
        with contextlib.suppress(LabError):
            server.down(lab.name)

    def __enter__(self) -> LabPool:
        # A session that was killed could not end its servers.
        for lab in server.labs():
            owner = re.fullmatch(rf"{re.escape(self._prefix)}-(\d+)-\d+", lab.name)
            if owner and processes.start_ticks(int(owner[1])) is None:
                self.end(lab)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lab in list(self._labs.values()):
            self.end(lab)
