"""Blocks of memory that are looked at together again and again, and who relies on what they hold.

Small blocks are read by the line that they lie in: what lies together costs one entry of a batched read, and what is
decoded afterwards finds its surroundings there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

from sgdiag.remote.memory import Batch, Block, Memory
from sgdiag.remote.recorder import Record, Sight, place_of


class _Held:
    """What a block holds to those who rely on it, and where it stands in its region."""

    __slots__ = ("content", "end", "start", "users")

    def __init__(self, content: bytes, start: int) -> None:
        self.content = content
        self.start, self.end = start, start + len(content)
        self.users: set[int] = set()


class _Region:
    """A line, or a block that fits in none. ``data``: as it was last seen. ``fits``: all of ``held`` agrees with it."""

    __slots__ = ("data", "fits", "held")

    def __init__(self) -> None:
        self.data = b""
        self.fits = False
        self.held: dict[Block, _Held] = {}


_Regions: TypeAlias = dict[Block, _Region]
"""By place."""


class _Batched:
    """Regions that are read together, part after part. ``clean``: what was read when last all of them fitted."""

    def __init__(self, memory: Memory, *parts: _Regions) -> None:
        self.batch = Batch(memory, [place for part in parts for place in part])
        self.regions = [region for part in parts for region in part.values()]
        self.clean = b""


class Watch:
    """What users, known by number, rely on.

    The first ``epoch_users`` of them rely on the epoch, which is looked at before and after all other values.
    ``moved``: the blocks that the last look found changed, as they are now, None where nothing can be read any more.
    """

    def __init__(self, memory: Memory, epoch_users: int) -> None:
        self.moved: dict[Block, bytes | None] = {}
        self._hits: dict[int, int] = {}
        self._misled: set[int] = set()
        self._memory = memory
        self._epoch_users = epoch_users
        self._epoch: _Regions = {}
        self._values: _Regions = {}
        self._guards: _Regions = {}
        self._all = (self._epoch, self._values, self._guards)
        self._value_batch: _Batched | None = None
        self._guard_batch: _Batched | None = None

    # --- who relies on what

    def rely(self, user: int, record: Record, instead_of: Record) -> None:
        """From now on ``user`` relies on ``record``, and no longer on what it relied on before."""
        same_guards = user not in self._misled and record.guards == instead_of.guards
        self._misled.discard(user)
        self._release(user, instead_of.blocks)
        if not same_guards:
            self._release(user, instead_of.guards)
        home = self._epoch if user < self._epoch_users else self._values
        for block, content in record.blocks.items():
            place = place_of(block)
            self._put(self._epoch if place in self._epoch else home, place, block, content, user)
        if not same_guards:
            for block, content in record.guards.items():
                place = place_of(block)
                there = (regions for regions in self._all if place in regions)
                self._put(next(there, self._guards), place, block, content, user)
        self._forget_clean()

    def _put(self, regions: _Regions, place: Block, block: Block, content: bytes, user: int) -> None:
        region = regions.get(place)
        if region is None:
            region = regions[place] = _Region()
            self._rearrange(regions)
        held = region.held.get(block)
        if held is None:
            held = region.held[block] = _Held(content, block[0] - place[0])
        elif held.content != content:
            if block not in self.moved:
                # Nobody has told the others yet that they have to look again.
                self._misled |= held.users
            held.content = content
        held.users.add(user)
        region.fits = False

    def _release(self, user: int, blocks: Mapping[Block, bytes]) -> None:
        for block in blocks:
            place = place_of(block)
            for regions in self._all:
                region = regions.get(place)
                held = region.held.get(block) if region is not None else None
                if region is None or held is None or user not in held.users:
                    continue
                held.users.remove(user)
                if not held.users:
                    del region.held[block]
                    if not region.held:
                        del regions[place]
                        self._rearrange(regions)

    def replace(self, block: Block, content: bytes) -> None:
        """``block`` holds ``content`` to all who rely on it; they know, since the last look found it so."""
        place = place_of(block)
        for regions in self._all:
            region = regions.get(place)
            if region is not None and block in region.held:
                region.held[block].content = content
                region.fits = False
        self._forget_clean()

    def _rearrange(self, regions: _Regions) -> None:
        if regions is self._guards:
            self._guard_batch = None
        else:
            self._value_batch = None

    def _forget_clean(self) -> None:
        for batched in (self._value_batch, self._guard_batch):
            if batched is not None:
                batched.clean = b""

    # --- looking

    def look(self) -> set[int]:
        """The users whose values may not be what they were. Guards are looked at only where they are beside values."""
        if self._value_batch is None:
            self._value_batch = _Batched(self._memory, self._epoch, self._values, self._epoch)
        return self._look(self._value_batch)

    def look_at_guards(self) -> set[int]:
        """The users to whom a guard is not what it was."""
        if self._guard_batch is None:
            self._guard_batch = _Batched(self._memory, self._guards)
        return self._look(self._guard_batch)

    def _look(self, batched: _Batched) -> set[int]:
        self.moved, self._hits = {}, {}
        found = batched.batch.read()
        if found != batched.clean:
            for region, piece in zip(batched.regions, batched.batch.apart(found), strict=True):
                if not (region.fits and piece == region.data):
                    self._compare(region, piece)
            batched.clean = found if isinstance(found, bytes) and not self.moved else b""
        return self._misled | self._hits.keys()

    def _compare(self, region: _Region, piece: bytes | None) -> None:
        region.fits = piece is not None
        region.data = piece or b""
        for block, held in region.held.items():
            content = None if piece is None else piece[held.start : held.end]
            if content == held.content:
                continue
            region.fits = False
            if block not in self.moved:
                for user in held.users:
                    self._hits[user] = self._hits.get(user, 0) + 1
            self.moved[block] = content

    def look_again(self, beside: Batch, times: int) -> list[Sight]:
        """All values and what is ``beside`` them, seen so often in a row, without a judgement.

        What could not be read is left out, and a look that saw the same as the one before it.
        """
        if self._value_batch is None:
            return []
        batches = beside, self._value_batch.batch
        # Nothing but reads here, since all depends on how soon the last one comes after the first.
        looks = [[batch.read() for batch in batches] for _ in range(times)]
        return [
            {
                block: piece
                for batch, found in zip(batches, look, strict=True)
                for block, piece in zip(batch.blocks, batch.apart(found), strict=True)
                if piece is not None
            }
            for look, _ in itertools.groupby(looks)
        ]

    def held_in(self, sight: Sight) -> bool:
        """Whether all values were seen there as they are relied on now."""
        for place, region in itertools.chain(self._epoch.items(), self._values.items()):
            piece = sight.get(place)
            if piece is None:
                return False
            if region.fits and piece == region.data:
                continue
            if any(piece[held.start : held.end] != held.content for held in region.held.values()):
                return False
        return True

    def only_change(self, user: int, block: Block) -> bytes | None:
        """What ``block`` holds now if the last look found nothing else changed that ``user`` relies on, else None."""
        return self.moved.get(block) if self._hits.get(user) == 1 and user not in self._misled else None

    def sight(self) -> Sight:
        """What the last look at values saw."""
        seen = itertools.chain(self._epoch.items(), self._values.items())
        return {place: region.data for place, region in seen if region.data}
