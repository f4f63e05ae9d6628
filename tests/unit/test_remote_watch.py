"""Who is told that memory is not what it was."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from sgdiag.remote.memory import Batch, Block, Memory
from sgdiag.remote.process import Process
from sgdiag.remote.recorder import Record, place_of
from sgdiag.remote.watch import Watch

LINE = 256


class Room:
    """Some pages of this process, to be read as another's."""

    def __init__(self) -> None:
        self.pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.memory = Memory(Process(os.getpid()))

    def put(self, at: int, content: bytes) -> None:
        self.pages[at : at + len(content)] = content

    def block(self, at: int, size: int = 8) -> Block:
        return self.start + at, size

    def record(self, *places: int, guards: tuple[int, ...] = ()) -> Record:
        """Of eight bytes at each place, as they are now."""
        return Record(
            {self.block(at): bytes(self.pages[at : at + 8]) for at in places},
            {self.block(at): bytes(self.pages[at : at + 8]) for at in guards},
        )


@pytest.fixture
def room() -> Room:
    return Room()


def watching(room: Room, *records: Record) -> Watch:
    watch = Watch(room.memory, 1)
    for user, record in enumerate(records):
        watch.rely(user, record, Record())
    return watch


def test_only_those_are_told_who_rely_on_what_changed(room: Room) -> None:
    watch = watching(room, room.record(0), room.record(512, 600), room.record(600, 2048))
    assert watch.look() == watch.look_at_guards() == set()
    for at, users in ((0, {0}), (512, {1}), (600, {1, 2}), (2048, {2}), (608, set()), (8, set())):
        room.put(at, b"other")
        assert watch.look() == users
        assert watch.moved.keys() == ({room.block(at)} if users else set())
        room.put(at, bytes(5))
    assert watch.look() == set()


def test_a_change_is_told_until_it_is_relied_on(room: Room) -> None:
    before = room.record(512)
    watch = watching(room, Record(), before)
    room.put(512, b"other")
    assert watch.look() == watch.look() == {1}
    watch.rely(1, room.record(512), before)
    assert watch.look() == set()


def test_guards_are_looked_at_for_themselves(room: Room) -> None:
    watch = watching(room, Record(), room.record(512, guards=(4096,)))
    room.put(4096, b"other")
    assert watch.look() == set()
    assert watch.look_at_guards() == {1}
    assert watch.moved == {room.block(4096): b"other\0\0\0"}


def test_who_is_contradicted_by_another_looks_again(room: Room) -> None:
    before = room.record(512)
    watch = watching(room, Record(), before)
    room.put(512, b"other")
    after = room.record(512)
    watch.rely(2, after, Record())
    assert watch.look() == {1}
    assert watch.only_change(1, room.block(512)) is None
    watch.rely(1, after, before)
    assert watch.look() == set()


def test_a_contradicted_guard_is_told_to_who_relied_on_it(room: Room) -> None:
    watch = watching(room, Record(), room.record(512, guards=(4096,)))
    room.put(4096, b"other")
    watch.rely(2, room.record(600, guards=(4096,)), Record())
    assert watch.look() == watch.look_at_guards() == {1}
    watch.rely(1, room.record(512, guards=(4096,)), room.record(512, guards=(4096,)))
    assert watch.look() == watch.look_at_guards() == set()


def test_a_single_changed_block_can_be_replaced(room: Room) -> None:
    watch = watching(room, Record(), room.record(512, 600), room.record(600))
    room.put(512, b"other")
    watch.look()
    assert watch.only_change(1, room.block(512)) == b"other\0\0\0"
    assert watch.only_change(1, room.block(600)) is watch.only_change(2, room.block(600)) is None
    watch.replace(room.block(512), b"other\0\0\0")
    assert watch.look() == set()
    room.put(512, b"third")
    room.put(600, b"third")
    assert watch.look() == {1, 2}
    assert watch.only_change(1, room.block(512)) is None
    assert watch.only_change(2, room.block(600)) == b"third\0\0\0"


def test_what_nobody_relies_on_is_not_read(room: Room) -> None:
    first = room.record(0, 8192)
    watch = watching(room, first)
    watch.look()
    watch.rely(0, room.record(0), first)
    before = room.memory.bytes_read
    watch.look()
    # The epoch's line, before and after all the rest.
    assert room.memory.bytes_read - before == 2 * LINE


def test_values_are_seen_again_with_what_is_beside_them(room: Room) -> None:
    watch = watching(room, room.record(0), room.record(512))
    beside = Batch(room.memory, [room.block(4096), (4096, 8)])
    assert watch.look_again(beside, 2) == []
    watch.look()
    room.put(512, b"other")
    room.put(4096, b"third")
    (seen,) = watch.look_again(beside, 3)
    assert seen.keys() == {room.block(4096), *(place_of(room.block(at)) for at in (0, 512))}
    assert seen[room.block(4096)] == b"third\0\0\0"
    assert seen[place_of(room.block(512))][:5] == b"other"


def test_looks_that_differ_are_told_apart(room: Room) -> None:
    contents = iter([bytes(5), b"other"])

    class Changing(Batch):
        def read(self) -> bytes | list[bytes | None]:
            room.put(512, next(contents))
            return super().read()

    watch = watching(room, Record(), room.record(512))
    watch.look()
    looks = watch.look_again(Changing(room.memory, []), 2)
    assert [watch.held_in(sight) for sight in looks] == [True, False]


def test_values_are_held_where_they_were_seen_as_they_are_relied_on(room: Room) -> None:
    before = room.record(512)
    watch = watching(room, room.record(0), before, room.record(600))
    watch.look()
    room.put(530, b"beside")
    (sight,) = watch.look_again(Batch(room.memory, []), 1)
    assert watch.held_in(sight)
    room.put(512, b"other")
    (later,) = watch.look_again(Batch(room.memory, []), 1)
    assert not watch.held_in(later)
    watch.rely(1, room.record(512), before)
    assert watch.held_in(later)
    assert not watch.held_in(sight)
    watch.rely(3, room.record(4096), Record())
    assert not watch.held_in(later)


def test_what_was_looked_at_is_seen_with_its_surroundings(room: Room) -> None:
    watch = watching(room, Record(), Record({room.block(200, 100): bytes(100)}), room.record(1024))
    room.put(1040, b"beside")
    watch.look()
    sight = watch.sight()
    assert sight[room.block(200, 100)] == bytes(100)
    assert sight[place_of(room.block(1024))][16:22] == b"beside"
    assert len(sight) == 2


def test_memory_that_is_gone_is_told(room: Room) -> None:
    watch = watching(room, Record(), room.record(512), Record({(4096, 8): bytes(8)}))
    room.put(512, b"other")
    assert watch.look() == {1, 2}
    assert watch.moved == {room.block(512): b"other\0\0\0", (4096, 8): None}
    assert watch.only_change(2, (4096, 8)) is None


@pytest.mark.parametrize("at", [520, 2048])
def test_what_never_was_so_is_told(room: Room, at: int) -> None:
    watch = watching(room, Record(), room.record(512))
    assert watch.look() == set()
    watch.rely(2, Record({room.block(at): b"invented"}), Record())
    assert watch.look() == {2}
    watch.replace(room.block(at), bytes(8))
    assert watch.look() == watch.look() == set()
    watch.replace(room.block(at), b"invented")
    assert watch.look() == {2}


def test_blocks_of_several_pages_are_told_apart(room: Room) -> None:
    places = (0, 600, 4096, 9000)
    watch = watching(room, Record(), *(room.record(at) for at in places))
    for user, at in enumerate(places, 1):
        room.put(at, b"other")
        assert watch.look() == {user}
        room.put(at, bytes(5))


def test_what_is_relied_on_no_longer_is_not_told(room: Room) -> None:
    before = room.record(9000, guards=(4096,))
    watch = watching(room, Record(), before, room.record(512))
    watch.look()
    watch.rely(1, Record(), before)
    room.put(9000, b"other")
    room.put(4096, b"other")
    bytes_before = room.memory.bytes_read
    assert watch.look() == watch.look_at_guards() == set()
    assert room.memory.bytes_read - bytes_before == LINE


def test_a_guard_that_is_relied_on_again_is_as_good_as_a_new_one(room: Room) -> None:
    first = room.record(512, guards=(4096,))
    watch = watching(room, Record(), first)
    watch.rely(2, Record({}, {room.block(4096): b"invented"}), Record())
    watch.rely(1, first, first)
    assert watch.look_at_guards() == {2}


def test_a_change_beside_a_contradiction_is_not_the_only_one(room: Room) -> None:
    watch = watching(room, Record(), room.record(512, 600))
    watch.rely(2, Record({room.block(600): b"invented"}), Record())
    room.put(512, b"other")
    room.put(600, b"invented")
    assert watch.look() == {1}
    assert watch.moved.keys() == {room.block(512)}
    assert watch.only_change(1, room.block(512)) is None


def test_who_was_told_of_a_change_is_not_told_again_by_another(room: Room) -> None:
    before = room.record(512)
    watch = watching(room, Record(), before, before)
    room.put(512, b"other")
    assert watch.look() == {1, 2}
    watch.rely(1, room.record(512), before)
    watch.replace(room.block(512), b"other\0\0\0")
    assert watch.look() == set()
