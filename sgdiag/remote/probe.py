"""The calibration child: measures, under the target's own interpreter, where CPython and libtorch keep things.

It makes objects of known content and searches its own memory for that content; an offset is what several such objects
have in common. No offset is taken from a table. One JSON line goes to stdout; then it keeps its corpus of known
objects alive until stdin closes, so that the parent can decode them from outside and compare.

Run as a program of its own, by CPython 3.10 to 3.14, with the standard library only. The first line of stdin is the
request: ``{"sys_path": [...] | null, "torch": bool}``.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import enum
import functools
import itertools
import json
import math
import os
import struct
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")
_C = TypeVar("_C", int, "tuple[int, ...]")

VERSION = sys.version_info[:2]
PID = os.getpid()
ADDRESS_LIMIT = 1 << 47
WORD = struct.Struct("<Q")
TYPE_BYTES: int = type.__basicsize__  # type: ignore[assignment]

readv = ctypes.CDLL(None).process_vm_readv
readv.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
readv.restype = ctypes.c_ssize_t

alive: list[object] = []


def keep(thing: _T) -> _T:
    """Holds on to an object whose address was written down."""
    alive.append(thing)
    return thing


class Sentinel:
    """An object found by its address only."""

    __slots__ = ()


def read(address: int, size: int) -> bytes:
    """Own memory, up to the end of the first unreadable page; a wild address gives nothing instead of a crash."""
    if not 0 < address < ADDRESS_LIMIT or size <= 0:
        return b""
    buffer = ctypes.create_string_buffer(size)
    local = struct.pack("<QQ", ctypes.addressof(buffer), size)
    got = readv(PID, local, 1, struct.pack("<QQ", address, size), 1, 0)
    if got < 0:
        return b""
    return buffer.raw[:got]


def words(address: int, size: int) -> tuple[int, ...]:
    data = read(address, size)
    count = len(data) // 8
    return struct.unpack(f"<{count}Q", data[: 8 * count])


def word(address: int) -> int:
    found = words(address, 8)
    return found[0] if found else 0


def places(address: int, size: int, value: int, start: int = 16) -> list[int]:
    """Offsets of the words equal to ``value``."""
    value &= (1 << 64) - 1
    return [start + 8 * i for i, found in enumerate(words(address + start, size - start)) if found == value]


def places_of_int(address: int, size: int, value: int) -> list[int]:
    """Offsets of the 32-bit integers equal to ``value``."""
    data = read(address, size)
    return [at for at in range(16, len(data) - 3, 4) if struct.unpack_from("<i", data, at)[0] == value]


def all_common(candidates: Iterable[Iterable[_C]], what: str) -> list[_C]:
    """Every offset that all the candidates share, in order."""
    shared: set[_C] | None = None
    for candidate in candidates:
        shared = set(candidate) if shared is None else shared & set(candidate)
    if not shared:
        raise LookupError(f"no offset found for {what}")
    return sorted(shared)


def common(candidates: Iterable[Iterable[_C]], what: str) -> _C:
    """The first offset that all the candidates share."""
    return all_common(candidates, what)[0]


def pointers(address: int, size: int, test: Callable[[int], bool], start: int = 16) -> list[int]:
    """Offsets of the words whose target passes ``test``."""
    return [start + 8 * i for i, found in enumerate(words(address + start, size - start)) if test(found)]


def leads_to(content: bytes) -> Callable[[int], bool]:
    """A test for pointers to memory that starts with ``content``."""
    return lambda target: read(target, len(content)) == content


def packed(things: Iterable[object]) -> bytes:
    """The pointers to these objects as they stand in memory."""
    return b"".join(WORD.pack(id(thing)) for thing in things)


def addresses(things: Iterable[object]) -> tuple[int, ...]:
    return tuple(id(thing) for thing in things)


# --- types and scalars


def probe_types() -> dict[str, int]:
    class Slotted:
        __slots__ = tuple(f"s{i:02d}" for i in range(37))

    class SlottedWithDict:
        __slots__ = (*(f"s{i:02d}" for i in range(41)), "__dict__", "__weakref__")

    kinds: list[type] = [type, int, str, dict, list, tuple, float, set, frozenset, bytes, BaseException, object]
    kinds += [types.FunctionType, types.ModuleType, functools.partial, collections.OrderedDict, collections.deque]
    kinds += [keep(Slotted), keep(SlottedWithDict)]
    heap_kinds = [Slotted, SlottedWithDict, Sentinel] + [keep(type(f"Heap{i}", (), {})) for i in range(3)]
    sentinel = Sentinel()
    mapping_of = {kind: word(id(keep(kind.__dict__)) + 16) for kind in heap_kinds}

    def member(read_member: Callable[[type], int], what: str) -> int:
        return common((places(id(kind), 416, read_member(kind), 24) for kind in kinds), what)

    def is_name(kind: type) -> Callable[[int], bool]:
        name = kind.__name__.encode()
        return lambda target: read(target, 80).split(b"\0")[0].split(b".")[-1] == name

    return {
        "of_object": common(
            [
                places(id(sentinel), 48, id(Sentinel), 0),
                places(id(alive), 24, id(list), 0),
                places(id(1.5), 24, id(float), 0),
            ],
            "ob_type",
        ),
        "basicsize": member(lambda kind: kind.__basicsize__, "tp_basicsize"),
        "itemsize": member(lambda kind: kind.__itemsize__, "tp_itemsize"),
        "flags": member(lambda kind: kind.__flags__, "tp_flags"),
        "dictoffset": member(lambda kind: kind.__dictoffset__, "tp_dictoffset"),
        "bases": member(lambda kind: id(kind.__mro__), "tp_mro"),
        "name": common((pointers(id(kind), 64, is_name(kind), 24) for kind in kinds), "tp_name"),
        "namespace": common((places(id(kind), TYPE_BYTES, mapping_of[kind], 24) for kind in heap_kinds), "tp_dict"),
    }


def probe_numbers() -> dict[str, int]:
    plus, minus, big = keep(123456), keep(-123456), keep((987654321 << 60) | (123456789 << 30) | 55555)
    sizes = [struct.unpack("<q", read(id(number) + 16, 8))[0] for number in (plus, minus, 0)]
    if sizes == [1, -1, 0]:
        tagged = 0
    elif sizes[:2] == [8, 10] and sizes[2] & 3 == 1 and sizes[2] >> 3 == 0:
        tagged = 1
    else:
        raise LookupError(f"ints have an unknown form: {sizes}")
    if sys.int_info.sizeof_digit != 4:
        raise LookupError("ints have digits of an unknown size")
    real, imaginary = keep(3.14159e77), keep(complex(1.25e55, -7.5e33))
    return {
        "int_tagged": tagged,
        "int_digit": common([places_of_int(id(plus), 48, 123456), places_of_int(id(big), 48, 55555)], "ob_digit"),
        "int_digit_bits": sys.int_info.bits_per_digit,
        "float_value": read(id(real), 48).index(struct.pack("<d", real)),
        "complex_value": read(id(imaginary), 64).index(struct.pack("<dd", imaginary.real, imaginary.imag)),
    }


def probe_text() -> dict[str, int]:
    def fresh(first: str) -> list[str]:
        return [keep(f"{first}-calibration-{PID}-{'x' * count}") for count in (3, 17, 40)]

    ascii_texts, latin, two, four = fresh("a"), fresh("\xe9"), fresh("\u4e16"), fresh("\U0001f600")
    encodings = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}

    def data_of(text: str, kind: int) -> list[int]:
        found = read(id(text), 600).find(text.encode(encodings[kind]))
        return [found] if found > 0 else []

    class Derived(str):
        __slots__ = ()

    derived = [keep(Derived(text)) for text in ascii_texts[1:]]
    length = common((places(id(text), 48, len(text)) for text in ascii_texts + latin + two + four), "str length")
    ascii_data = common((data_of(text, 1) for text in ascii_texts), "ascii data")
    any_data = [pointers(id(text), 96, leads_to(text.encode())) for text in derived]
    raw = keep(bytes(bytearray(b"calibration-bytes-%d" % PID)))
    moved = [keep(bytearray(b"calibration-bytearray-%d-%d" % (PID, i))) for i in range(3)]
    for mutable in moved:
        del mutable[:3]
    starts = [pointers(id(mutable), 64, leads_to(bytes(mutable))) for mutable in moved]
    return {
        "length": length,
        **_text_state(length + 8, ascii_data, ascii_texts, latin, two, four, derived),
        "ascii_data": ascii_data,
        "compact_data": common(
            [data_of(text, kind) for kind, texts in ((1, latin), (2, two), (4, four)) for text in texts], "str data"
        ),
        # An ascii text's cached UTF-8 pointer may lead to the same bytes; the data pointer comes after it.
        "any_data": all_common(any_data, "str data.any")[-1],
        "bytes_data": read(id(raw), 96).index(raw),
        "bytearray_start": common(starts, "bytearray start"),
    }


def _text_state(
    start: int,
    end: int,
    ascii_texts: list[str],
    latin: list[str],
    two: list[str],
    four: list[str],
    derived: Sequence[str],
) -> dict[str, int]:
    compact = ascii_texts + latin + two + four
    for at in range(start, end, 4):

        def state(text: str, at: int = at) -> int:
            return int(struct.unpack("<I", read(id(text) + at, 4))[0])

        for shift in range(30):
            kinds = [{state(text) >> shift & 7 for text in texts} for texts in (ascii_texts + latin, two, four)]
            if kinds != [{1}, {2}, {4}]:
                continue
            is_ascii = [
                bit
                for bit in range(32)
                if all(state(text) >> bit & 1 for text in ascii_texts)
                and not any(state(text) >> bit & 1 for text in latin + two + four)
            ]
            is_compact = [
                bit
                for bit in range(32)
                if all(state(text) >> bit & 1 for text in compact)
                and not any(state(text) >> bit & 1 for text in derived)
            ]
            if is_ascii and is_compact:
                return {"state": at, "kind_shift": shift, "ascii_bit": is_ascii[0], "compact_bit": is_compact[0]}
    raise LookupError("no offset found for str state")


# --- containers


def probe_sequences(tuple_items: int) -> dict[str, int]:
    items = [keep(Sentinel()) for _ in range(300)]
    lists = [keep(items[:5]), keep(items[:77])]
    arrays = [keep(array.array(code, [3, 1, 4, 1, 5])) for code in "qibHd"]
    spans = [keep(range(1000 + i, 90000 + i, 7)) for i in range(3)]
    cuts = [keep(slice(keep(Sentinel()), keep(Sentinel()), keep(Sentinel()))) for _ in range(3)]
    return {
        "list_items": common(
            [pointers(id(some), 40, leads_to(packed(some[:2]))) for some in lists],
            "list items",
        ),
        "tuple_items": tuple_items,
        **_probe_sets(items),
        **_probe_deques(items),
        "array_items": common(
            [pointers(id(some), 64, leads_to(some.tobytes())) for some in arrays],
            "array items",
        ),
        "array_descriptor": common(
            [pointers(id(some), 64, leads_to(some.typecode.encode() + b"\0")) for some in arrays],
            "array descriptor",
        ),
        "range_start": common(
            [[at for at in range(16, 48, 8) if places_of_int(word(id(span) + at), 32, span.start)] for span in spans],
            "range start",
        ),
        "slice_start": common([places(id(cut), 48, id(cut.start)) for cut in cuts], "slice start"),
    }


def probe_tuple() -> int:
    items = [keep(Sentinel()) for _ in range(30)]
    tuples = [keep(tuple(items[3:8])), keep(tuple(items[3:29]))]
    return common((places(id(some), 48, id(some[0])) for some in tuples), "tuple items")


def _probe_sets(items: list[Sentinel]) -> dict[str, int]:
    small, large = keep(set(items[:6])), keep(set(items[:100]))
    small.discard(items[2])
    large -= set(items[50:52])
    tables: list[list[tuple[int, ...]]] = []
    for some in (small, large):
        wanted = set(addresses(some))
        found: list[tuple[int, ...]] = []
        header = words(id(some), 80)
        for i, table in enumerate(header[2:], 2):
            for j, mask in enumerate(header[2:], 2):
                if mask & (mask + 1) == 0 and 7 <= mask < 4096:
                    keys = words(table, 16 * (mask + 1))[::2]
                    if len(keys) == mask + 1 and wanted <= set(keys):
                        found.append((8 * i, 8 * j))
        tables.append(found)
    table, mask_at = common(tables, "set table")
    return {
        "set_used": common([places(id(small), 80, 5), places(id(large), 80, 98)], "set used"),
        "set_mask": mask_at,
        "set_table": table,
    }


def _probe_deques(items: list[Sentinel]) -> dict[str, int]:
    long, short = keep(collections.deque(items[:200])), keep(collections.deque(items[5:9]))
    for _ in range(3):
        long.popleft()
    candidates: list[list[tuple[int, ...]]] = []
    for some in (long, short):
        header = words(id(some), 80)
        found: list[tuple[int, ...]] = []
        for i, block in enumerate(header[2:], 2):
            first = places(block, 8 * 66, id(some[0]), 0)
            for j, index in enumerate(header[2:], 2):
                if index < 64 and first and first[0] - 8 * index == 8:
                    found.append((8 * i, 8 * j))
        candidates.append(found)
    left_block, left_index = common(candidates, "deque block")
    block = word(id(long) + left_block)
    # The first block lost three items on the left, so its successor starts with the item behind its last one.
    in_first = 64 - word(id(long) + left_index)
    follows = [at for at in range(16, 8 * 67, 8) if word(word(block + at) + 8) == id(long[in_first])]
    return {
        "deque_size": common([places(id(some), 80, len(some)) for some in (long, short)], "deque size"),
        "deque_left_block": left_block,
        "deque_left_index": left_index,
        "deque_block_data": 8,
        "deque_block_items": (follows[0] - 8) // 8,
        "deque_block_next": follows[0],
    }


class _Table:
    """A dict with its keys and values, and where the first of them are in its table of keys."""

    def __init__(self, keys: list[object]) -> None:
        self.keys = keep(keys)
        self.values = keep([Sentinel() for _ in keys])
        self.dict = keep(dict(zip(keys, self.values, strict=True)))

    def locate(self, table: int) -> None:
        self.header = read(table, 48)
        found = words(table, min(1 << 20, 512 + 64 * len(self.keys)))
        self.first = found.index(id(self.keys[0])) * 8
        self.stride = found.index(id(self.keys[1])) * 8 - self.first
        self.value = found.index(id(self.values[0])) * 8 - self.first


def _slots_size(count: int) -> int:
    """Bytes of a 3.10 index table of so many slots."""
    return count * (1 if count <= 0xFF else 2 if count <= 0xFFFF else 4 if count <= 0xFFFFFFFF else 8)


def probe_dicts() -> dict[str, int]:
    counts = (3, 11, 100, 700, 70000)
    unicode = [_Table([f"dict_key_{count}_{i}" for i in range(count)]) for count in counts]
    general = [_Table([(count, i) for i in range(count)]) for count in counts]
    tables = unicode + general

    def is_table(table: _Table) -> Callable[[int], bool]:
        wanted = {id(table.keys[0]), id(table.values[0]), id(table.keys[2])}
        return lambda target: wanted <= set(words(target, min(1 << 20, 512 + 64 * len(table.keys))))

    keys = common((pointers(id(table.dict), 56, is_table(table)) for table in tables), "ma_keys")
    for table in tables:
        table.locate(word(id(table.dict) + keys))
    index, is_log2, entries = _index_form(unicode, general)
    kinds = [
        at for at in range(24) if all(t.header[at] == 0 for t in general) and all(t.header[at] == 1 for t in unicode)
    ]
    return {
        "used": common((places(id(table.dict), 56, len(table.keys)) for table in tables), "ma_used"),
        "keys": keys,
        "index": index,
        "index_is_log2": is_log2,
        "kind": kinds[0] if kinds else -1,
        "count": common((places(word(id(t.dict) + keys), 48, len(t.keys), 0) for t in tables), "dk_nentries"),
        "unicode_entries": entries[0],
        "unicode_stride": unicode[0].stride,
        "unicode_value": unicode[0].value,
        "general_entries": entries[1],
        "general_stride": general[0].stride,
        "general_value": general[0].value,
    }


def _index_form(unicode: list[_Table], general: list[_Table]) -> tuple[int, int, tuple[int, int]]:
    """Where and how the size of the index table is kept, and where the first entry is behind it."""

    def distances(tables: list[_Table], size: Callable[[bytes], int]) -> set[int]:
        return {table.first - size(table.header) for table in tables}

    for at in range(24):
        if all(table.header[at] < 40 for table in unicode + general):
            forms = [distances(tables, lambda header: 1 << header[at]) for tables in (unicode, general)]  # noqa: B023
            if all(len(form) == 1 for form in forms):
                return at, 1, (forms[0].pop(), forms[1].pop())
    for at in range(0, 32, 8):
        forms = [
            distances(tables, lambda header: _slots_size(WORD.unpack_from(header, at)[0]))  # noqa: B023
            for tables in (unicode, general)
        ]
        if all(len(form) == 1 for form in forms):
            return at, 0, (forms[0].pop(), forms[1].pop())
    raise LookupError("no offset found for the size of a dict's index")


# --- instances


class FirstSplit:
    def __init__(self, values: Sequence[object]) -> None:
        self.zz_one, self.zz_two, self.zz_three = values


class SecondSplit:
    def __init__(self, values: Sequence[object]) -> None:
        self.yy_one, self.yy_two, self.yy_three = values


def probe_instances(dicts: dict[str, int]) -> tuple[dict[str, int], dict[str, int], int]:
    """The instance section, the rest of the dict section, and where a type keeps its shared keys."""
    values = keep([Sentinel() for _ in range(3)])
    classes: list[type[Any]] = [FirstSplit, SecondSplit]
    objects = {kind: keep([kind(values) for _ in range(4)]) for kind in classes}
    names = {
        kind: [sys.intern(prefix + name) for name in ("one", "two", "three")]
        for kind, prefix in zip(classes, ("zz_", "yy_"), strict=True)
    }

    def index_size(table: int) -> int:
        header = read(table, 48)
        if len(header) < 48:
            return 0
        at = dicts["index"]
        if dicts["index_is_log2"]:
            return 1 << header[at] if header[at] < 10 else 0
        return _slots_size(WORD.unpack_from(header, at)[0])

    def is_shared_table(kind: type) -> Callable[[int], bool]:
        def test(target: int) -> bool:
            found, size = words(target, 1024), index_size(target)
            wanted = addresses(names[kind])
            if not (0 < size < 900 and set(wanted) <= set(found)):
                return False
            first = min(found.index(name) for name in wanted) * 8 - size
            return first in (dicts["unicode_entries"], dicts["general_entries"])

        return test

    cached_keys = common((pointers(id(k), TYPE_BYTES, is_shared_table(k), 24) for k in classes), "shared keys")
    # 3.13 fills the shared keys from __static_attributes__, so their order is not that of assignment.
    order: dict[type, list[tuple[int, int]]] = {}
    for kind in classes:
        found = words(word(id(kind) + cached_keys), 1024)
        order[kind] = sorted((found.index(id(name)), i) for i, name in enumerate(names[kind]))
    first_table = word(id(FirstSplit) + cached_keys)
    expected = {kind: tuple(id(values[i]) for _, i in order[kind]) for kind in classes}
    placed = [_value_places(objects[kind][0], expected[kind]) for kind in classes]
    shared_places = set(placed[0]) & set(placed[1])

    materialised = {kind: keep(objects[kind][1].__dict__) for kind in classes}
    dict_at = common(
        [
            [
                at
                for at in range(-32, kind.__basicsize__ + 64, 8)
                if word(id(objects[kind][1]) + at) == id(materialised[kind])
            ]
            for kind in classes
        ],
        "instance dict",
    )
    instances = _instance_form(dict_at, shared_places, objects[FirstSplit], values)
    split_values = [
        (8 * i, shift)
        for i, target in enumerate(words(id(materialised[FirstSplit]), 56))
        for shift in (0, 8)
        if i > 1 and words(target + shift, 24) == expected[FirstSplit]
    ]
    # Where a materialised dict is a combined one, its (empty) values pointer still follows the keys pointer.
    values_at, values_items = split_values[0] if split_values else (dicts["keys"] + 8, 0)
    first, second = (at for at, _ in order[FirstSplit][:2])
    return (
        instances,
        {
            "values": values_at,
            "values_items": values_items,
            "split_entries": 8 * first - index_size(first_table),
            "split_stride": 8 * (second - first),
        },
        cached_keys,
    )


def _value_places(thing: object, expected: tuple[int, ...]) -> list[tuple[int, ...]]:
    """(is_inline, offset, offset behind the pointer) of where a row of attribute values is found."""
    size = type(thing).__basicsize__
    found: list[tuple[int, ...]] = []
    for at in range(-32, size + 64, 8):
        if words(id(thing) + at, 24) == expected:
            found.append((1, at - size, 0))
        found += [(0, at, tag) for tag in (0, 1) if words(word(id(thing) + at) + tag, 24) == expected]
    return found


def _instance_form(
    dict_at: int, found: set[tuple[int, ...]], objects: list[Any], values: list[Sentinel]
) -> dict[str, int]:
    form = {"mode": 0, "own_dict": dict_at, "values": 0, "values_items": 0, "inline_valid": -1}
    if dict_at >= 0:
        return form
    inline = sorted(place for place in found if place[0])
    if inline:
        replaced, untouched = objects[3], objects[2]
        replaced.__dict__ = keep({"zz_one": values[0]})
        size, gap = FirstSplit.__basicsize__, inline[0][1]
        before, after = read(id(untouched) + size, gap), read(id(replaced) + size, gap)
        valid = [at for at in range(gap) if before[at] == 1 and after[at] == 0]
        return form | {"mode": 3, "values_items": gap, "inline_valid": valid[-1]}
    if not found:
        raise LookupError("no place found for the attributes of an instance")
    _, at, tag = min(found)
    return form | {"mode": 2 if at == dict_at else 1, "values": at, "values_items": tag}


def probe_misc() -> dict[str, int]:
    class Slots:
        __slots__ = ("first", "second", "third")
        first: Sentinel
        second: Sentinel
        third: Sentinel

    slots = keep(Slots())
    slots.first, slots.second, slots.third = (keep(Sentinel()) for _ in range(3))
    definitions: list[list[tuple[int, ...]]] = []
    for name in Slots.__slots__:
        descriptor = keep(Slots).__dict__[name]
        found: list[tuple[int, ...]] = []
        has_name = leads_to(name.encode() + b"\0")
        for at in range(16, 64, 8):
            definition = word(id(descriptor) + at)
            if not has_name(word(definition)):
                continue
            found += [
                (at, inner)
                for inner in range(8, 40, 8)
                if 0 < word(definition + inner) < 64
                and word(id(slots) + word(definition + inner)) == id(getattr(slots, name))
            ]
        definitions.append(found)
    definition_at, offset_at = common(definitions, "member descriptor")

    captured = keep(Sentinel())

    def closure() -> Sentinel:
        return captured

    class Methods:
        def method(self) -> None: ...

        @property
        def one(self) -> None: ...

        @property
        def two(self) -> None: ...

    thing = keep(Methods())
    method, reference, partial = keep(thing.method), keep(weakref.ref(thing)), keep(functools.partial(closure))
    properties = [Methods.__dict__["one"], Methods.__dict__["two"]]
    named = keep(collections.namedtuple("named", "f0 f1 f2 f3 f4 f5 f6 f7"))
    functions = [closure, probe_misc]
    return {
        "cell": common([places(id((closure.__closure__ or ())[0]), 32, id(captured))], "cell"),
        "method_function": common([places(id(method), 40, id(Methods.method))], "im_func"),
        "weakref_object": common([places(id(reference), 40, id(thing))], "weakref"),
        "partial_function": common([places(id(partial), 40, id(closure))], "partial"),
        "function_code": common(
            (places(id(f), types.FunctionType.__basicsize__, id(f.__code__)) for f in functions), "func_code"
        ),
        "property_getter": common(
            (places(id(some), property.__basicsize__, id(some.fget)) for some in properties), "property getter"
        ),
        "tuplegetter_index": common(
            (places(id(named.__dict__[f"f{i}"]), 32, i) for i in (3, 5, 7)), "field of a named tuple"
        ),
        "member_definition": definition_at,
        "member_offset": offset_at,
        "member_type": 8,
        "member_object_type": struct.unpack("<i", read(word(id(Slots.__dict__["first"]) + definition_at) + 8, 4))[0],
    }


# --- code, frames, threads


def probe_code(type_of: int, tuple_items: int) -> dict[str, int]:
    functions = [probe_code, probe_dicts, probe_text]

    class Outer:
        def first(self) -> None: ...

        def second(self) -> None: ...

    methods = [keep(Outer).first, Outer.second]

    def plain(aa_1: object, bb_2: object) -> tuple[object, ...]:
        cc_3 = 1
        dd_4 = 2
        return aa_1, bb_2, cc_3, dd_4

    def with_cell(ee_1: object, ff_2: object) -> object:
        def inner() -> object:
            return ff_2

        return inner, ee_1

    free = keep(with_cell)(1, 2)[0]  # type: ignore[index]

    def tuples(code: types.CodeType, names: Sequence[str]) -> list[int]:
        wanted = addresses(sys.intern(name) for name in names)

        def test(target: int) -> bool:
            is_tuple = word(target + type_of) == id(tuple) and word(target + 16) == len(names)
            return is_tuple and words(target + tuple_items, 8 * len(names)) == wanted

        return pointers(id(code), 240, test)

    def pointer_to(attribute: str, some: Sequence[Any]) -> int:
        codes = [function.__code__ for function in some]
        return common((places(id(c), 240, id(getattr(c, attribute))) for c in codes), attribute)

    modern = VERSION >= (3, 11)
    return {
        "name": pointer_to("co_name", functions + methods),
        "qualified_name": pointer_to("co_qualname", methods) if modern else -1,
        "filename": pointer_to("co_filename", functions),
        "first_line": common(
            (places_of_int(id(f.__code__), 240, f.__code__.co_firstlineno) for f in functions), "co_firstlineno"
        ),
        "line_table": pointer_to("co_linetable", functions),
        "names": pointer_to("co_names", functions),
        "variables": common([tuples(keep(plain).__code__, ("aa_1", "bb_2", "cc_3", "dd_4"))], "variable names"),
        "cell_variables": -1 if modern else common([tuples(with_cell.__code__, ("ff_2",))], "cell variables"),
        "free_variables": -1 if modern else common([tuples(free.__code__, ("ff_2",))], "free variables"),
        "instructions": types.CodeType.__basicsize__ if modern else -1,
    }


def probe_frames() -> tuple[dict[str, int], dict[str, int]]:
    """The frame section, and where a thread state leads to its topmost frame."""
    api = ctypes.pythonapi
    api.PyThreadState_Get.restype = ctypes.c_void_p
    state = api.PyThreadState_Get()

    def outer() -> tuple[dict[str, int], dict[str, int]]:
        return inner(keep(Sentinel()), keep(Sentinel()))

    def inner(one: Sentinel, two: Sentinel) -> tuple[dict[str, int], dict[str, int]]:
        # The copy is taken in this very frame: a helper written in Python would be the topmost frame itself.
        buffer = ctypes.create_string_buffer(1024)
        local = struct.pack("<QQ", ctypes.addressof(buffer), 1024)
        readv(PID, local, 1, struct.pack("<QQ", state, 1024), 1, 0)
        state_words = struct.unpack("<128Q", buffer.raw)
        behind: dict[int, tuple[int, ...]] = {}
        for i, target in enumerate(state_words):
            if 4096 < target < ADDRESS_LIMIT and readv(PID, local, 1, struct.pack("<QQ", target, 64), 1, 0) == 64:
                behind[8 * i] = struct.unpack("<8Q", buffer.raw[:64])
        here = sys._getframe()
        form, address = _frame_form(here, one, two)
        direct = [8 * i for i, target in enumerate(state_words) if target == address]
        if direct:
            return form, {"thread_frame": direct[0], "thread_frame_indirect": -1}
        for at, found in behind.items():
            if address in found and VERSION < (3, 13):
                return form, {"thread_frame": at, "thread_frame_indirect": 8 * found.index(address)}
        raise LookupError("no offset found for the topmost frame")

    return outer()


def _frame_form(frame: types.FrameType, one: object, two: object) -> tuple[dict[str, int], int]:
    """The frame section and the address of the frame itself, given a frame with two known locals."""
    back = frame.f_back
    if back is None or back.f_back is None:
        raise LookupError("the probe's own frames are gone")
    code, back_code = id(frame.f_code), id(back.f_code)
    if VERSION < (3, 11):
        address = id(frame)
        return {
            "code": common([places(address, 120, code), places(id(back), 120, back_code)], "frame code"),
            "previous": common([places(address, 120, id(back)), places(id(back), 120, id(back.f_back))], "f_back"),
            # The same pair may lie on the value stack, too, which comes after the locals.
            "locals": next(
                at for at in places(address, frame.__sizeof__() + 64, id(one)) if word(address + at + 8) == id(two)
            ),
            "instruction": common((places_of_int(id(f), 160, f.f_lasti // 2) for f in (back, back.f_back)), "f_lasti"),
            "tag_mask": 0,
        }, address
    mask = 3 if VERSION >= (3, 14) else 0

    def untagged(address: int, size: int) -> list[int]:
        return [found & ~mask for found in words(address, size)]

    known = {code, id(one), id(two)}
    inner_at = pointers(id(frame), 64, lambda target: known <= set(untagged(target, 240)))[0]
    address, back_address = word(id(frame) + inner_at), word(id(back) + inner_at)
    layout = untagged(address, 240)
    code_at, locals_at = 8 * layout.index(code), 8 * layout.index(id(one))
    if layout[locals_at // 8 + 1] != id(two) or word(back_address + code_at) & ~mask != back_code:
        raise LookupError("frames have an unknown form")
    instructions = back_code + types.CodeType.__basicsize__
    return {
        "code": code_at,
        "previous": common([places(address, 120, back_address, 0)], "previous frame"),
        "locals": locals_at,
        "instruction": common([places(back_address, locals_at, instructions + back.f_lasti, 0)], "frame instruction"),
        "tag_mask": mask,
    }, address


def probe_runtime() -> dict[str, int]:
    api = ctypes.pythonapi
    for name in ("PyThreadState_Get", "PyInterpreterState_Get"):
        getattr(api, name).restype = ctypes.c_void_p
    interpreter = api.PyInterpreterState_Get()
    runtime = ctypes.addressof(ctypes.c_byte.in_dll(api, "_PyRuntime"))
    states = [(api.PyThreadState_Get(), threading.get_ident(), threading.get_native_id())]
    release = threading.Event()

    def body(started: threading.Event) -> None:
        states.insert(0, (api.PyThreadState_Get(), threading.get_ident(), threading.get_native_id()))
        started.set()
        release.wait()

    threads = []
    for _ in range(3):
        started = threading.Event()
        threads.append(threading.Thread(target=body, args=(started,), daemon=True))
        threads[-1].start()
        started.wait()
    try:
        natives = [places(state, 768, native) for state, _, native in states]
        return {
            "interpreters_head": common([places(runtime, 4096, interpreter)], "interpreters"),
            "interpreter_threads": common([places(interpreter, 1 << 18, states[0][0], 0)], "threads"),
            "interpreter_modules": common([places(interpreter, 1 << 18, id(sys.modules))], "sys.modules"),
            "thread_next": common((places(a[0], 768, b[0], 0) for a, b in itertools.pairwise(states)), "next thread"),
            "thread_ident": common((places(state, 768, ident) for state, ident, _ in states), "thread id"),
            "thread_native": common(natives, "native thread id") if VERSION >= (3, 11) else -1,
        }
    finally:
        release.set()
        for thread in threads:
            thread.join()


# --- torch


def probe_torch() -> tuple[dict[str, Any], list[Any]]:
    """The torch section, and the tensors that it was measured on."""
    import torch

    inline = [
        keep(torch.empty_strided(shape, stride))
        for shape, stride in (
            ((3, 5, 7), (41, 8, 1)),
            ((13, 17), (19, 1)),
            ((23,), (3,)),
            ((2, 3, 4, 5), (1000, 200, 41, 7)),
            ((2, 3, 2, 5, 7), (2000, 600, 300, 50, 7)),
        )
    ]
    outer = [
        keep(torch.empty_strided((2, 3, 2, 3, 2, 5), (3000, 900, 400, 100, 40, 7))),
        keep(torch.empty_strided((1, 2, 3, 2, 1, 2, 3), (9, 801, 203, 55, 22, 11, 3))),
    ]
    base = keep(torch.arange(5000))
    views = [keep(base[1234:1300]), keep(base[777:778]), keep(base[4321:4400])]

    def sizes_of(tensor: Any) -> list[tuple[int, ...]]:
        count = tensor.dim()
        found: list[tuple[int, ...]] = []
        for at in range(16, 72, 8):
            data = words(word(id(tensor) + at), 640)
            found += [
                (at, 8 * i)
                for i in range(len(data) - count - 5)
                if data[i : i + count] == tuple(tensor.shape) and data[i + 5 : i + 5 + count] == tensor.stride()
            ]
        return found

    implementation_at, sizes = common((sizes_of(tensor) for tensor in inline), "tensor sizes")

    def implementation(tensor: Any) -> int:
        return word(id(tensor) + implementation_at)

    for tensor in outer:
        behind = words(word(implementation(tensor) + sizes), 16 * tensor.dim())
        if behind != (*tensor.shape, *tensor.stride()):
            raise LookupError("tensors of many dimensions have an unknown form")

    def storages(tensor: Any) -> list[tuple[int, ...]]:
        data = tensor.untyped_storage().data_ptr()
        return [
            (8 * i, at)
            for i, target in enumerate(words(implementation(tensor), 640))
            for at in places(target, 128, data, 0)
        ]

    storage, storage_data = common((storages(tensor) for tensor in inline + views), "storage")
    dtypes = _dtypes(torch, implementation)
    devices = _devices(torch)
    plain = [keep(torch.empty(3)), keep(torch.empty(2, 2)), keep(torch.zeros(7, dtype=torch.int8))]
    meta = [keep(torch.empty(count, device="meta")) for count in (3, 4)]

    def device_places(tensor: Any) -> list[int]:
        value = read(id(tensor.device) + devices["device_value"], 2)
        data = read(implementation(tensor), 400)
        return [at for at in range(8, len(data) - 2) if data[at : at + 2] == value and data[at + 2] == 1]

    section = {
        "implementation": implementation_at,
        "sizes": sizes,
        "inline_dimensions": 5,
        "dimensions": common(
            ([at for at in places(implementation(t), 640, t.dim(), 0) if at < sizes] for t in inline + outer),
            "dimensions",
        ),
        "elements": common(
            ([at for at in places(implementation(t), 640, t.numel(), 0) if at >= sizes + 80] for t in inline + outer),
            "elements",
        ),
        "storage_offset": common(
            (places(implementation(t), 640, t.storage_offset(), 0) for t in views), "storage offset"
        ),
        "storage": storage,
        "storage_data": storage_data,
        "storage_bytes": common(
            (places(word(implementation(t) + storage), 128, t.untyped_storage().nbytes(), 0) for t in inline + views),
            "storage size",
        ),
        **dtypes,
        **devices,
        "device": common((device_places(tensor) for tensor in plain + meta), "device"),
    }
    return section, inline + outer + views + plain + meta


def _dtypes(torch: Any, implementation: Callable[[Any], int]) -> dict[str, Any]:
    kinds = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
    pairs = []
    for kind in dict.fromkeys(kinds.values()):
        try:
            pair = [keep(torch.empty(shape, dtype=kind, device="meta")) for shape in ((3,), (2, 5))]
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        pairs.append((kind, pair))
    for at in range(8, 400):
        codes: dict[int, Any] = {}
        for kind, pair in pairs:
            found = {struct.unpack("<H", read(implementation(tensor) + at, 2))[0] for tensor in pair}
            code = found.pop()
            if found or code > 255 or codes.setdefault(code, kind) is not kind:
                break
        else:
            return {
                "dtype": at,
                "dtype_name": read(id(torch.bfloat16), 96).index(b"bfloat16\0"),
                "dtypes": [[code, str(kind).removeprefix("torch.")] for code, kind in codes.items()],
                "item_bytes": [[pair[0].element_size(), str(kind).removeprefix("torch.")] for kind, pair in pairs],
            }
    raise LookupError("no offset found for dtype")


def _devices(torch: Any) -> dict[str, Any]:
    samples = [keep(torch.device(name)) for name in ("cpu", "cuda:0", "cuda:5", "cuda")]
    for at in range(16, 32):
        cpu, first, sixth, any_index = (read(id(device) + at, 2) for device in samples)
        same_kind = cpu[0] == 0 != first[0] == sixth[0] == any_index[0]
        if same_kind and (first[1], sixth[1], any_index[1]) == (0, 5, 255):
            break
    else:
        raise LookupError("no offset found for device")
    names = []
    for name in ("cpu", "cuda", "meta", "xpu", "mps", "hpu", "xla", "npu", "privateuseone", "hip", "mtia", "maia"):
        try:
            device = torch.device(name)
        except RuntimeError:
            continue
        names.append([read(id(device) + at, 1)[0], name])
    return {"device_value": at, "devices": names}


# --- the corpus


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    LOW = 7


class Option(enum.Flag):
    ONE = 1
    TWO = 2


class Slotted:
    __slots__ = ("u", "unset", "v")

    def __init__(self) -> None:
        self.u, self.v = 1, "vee"


class SlottedChild(Slotted):
    pass


class Bag:
    pass


class BigInt(int):
    pass


class Text(str):
    pass


@dataclasses.dataclass
class Record:
    a: int = 1
    b: str = "bee"
    c: list[int] = dataclasses.field(default_factory=lambda: [1, 2, 3])


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


def corpus_values() -> list[object]:
    """Objects of every form that the decoder knows."""
    few, many, late, child, number = Bag(), Bag(), Bag(), SlottedChild(), BigInt(12345678901234567890)
    few.__dict__.update(x=1)
    few.y, few.z = "two", [3.0]  # type: ignore[attr-defined]
    for i in range(70):
        setattr(many, f"attribute_{i}", i)
    late.x = 5  # type: ignore[attr-defined]
    keep(late.__dict__)
    late.late = "yes"  # type: ignore[attr-defined]
    child.other = (1, 2)  # type: ignore[attr-defined]
    number.note = "n"  # type: ignore[attr-defined]
    with_holes = {f"k{i}": i for i in range(30)}
    for i in range(0, 30, 3):
        del with_holes[f"k{i}"]
    shifted = collections.deque(range(300), maxlen=500)
    for _ in range(70):
        shifted.popleft()
    cut = bytearray(b"cut-from-the-left")
    del cut[:4]
    return [
        *(None, True, False, 0, 1, -1, 255, -5, 1 << 30, (1 << 30) - 1, 1 << 60, -(1 << 61), 1 << 200, 17 - (1 << 333)),
        *(0.0, -1.5, 1e300, float("inf"), float("-inf"), float("nan"), 2 - 3j),
        *("", "a", "ascii text", "\xe9 latin", "\u4e16\u754c", "\U0001f600 astral", "\udc80 lone", "x" * 3000),
        *(b"", b"\0\1\2bytes", bytearray(), cut),
        *([], [1, [2, [3]]], (), (1, "a", None), {}, {"a": 1, "b": {"c": [1, 2]}}, {1: 2, "x": 3, (4, 5): 6}),
        *(with_holes, {i: str(i) for i in range(200)}, set(range(200)), set(), {1, 2, 3}, frozenset("ab")),
        *(array.array("q", [1, -2, 3]), array.array("d", [1.5]), array.array("i")),
        *(shifted, collections.deque([1, 2]), collections.OrderedDict(a=1, b=2), collections.defaultdict(list, k=[1])),
        *(range(3), range(5, 1000000, 7), slice(1, None, 2)),
        *(Color.RED, Color.PAIR, Level.LOW, Option.ONE, Option.ONE | Option.TWO),
        *(few, many, late, Slotted(), child, Record(), number, Text("sub-string \xe9"), Point(1, "z")),
        types.SimpleNamespace(k=1),
    ]


def describe(value: Any) -> Any:
    """The plain form that the parent's decoder gives, too."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if isinstance(value, enum.Enum):
        return {"enum": kind.__name__, "name": value._name_, "value": describe(value._value_)}
    if kind is range or kind is slice:
        return {kind.__name__: [value.start, value.stop, value.step]}
    return _describe_container(value)


def _describe_container(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return [describe(item) for item in value]
    if kind in (set, frozenset):
        return {kind.__name__: sorted((describe(item) for item in value), key=json.dumps)}
    if kind in (tuple, collections.deque, array.array):
        return {kind.__name__: [describe(item) for item in value]}
    if isinstance(value, dict):
        return {kind.__name__: [[describe(key), describe(item)] for key, item in value.items()]}
    attributes = dict(getattr(value, "__dict__", {}))
    for base in kind.__mro__:
        slots = getattr(base, "__slots__", ())
        attributes.update((name, getattr(value, name)) for name in slots if hasattr(value, name))
    if isinstance(value, tuple):
        attributes.update(value._asdict())  # type: ignore[attr-defined]
    described: dict[str, Any] = {
        "object": kind.__name__,
        "attributes": {name: describe(attributes[name]) for name in sorted(attributes)},
    }
    for base in (int, str):
        if isinstance(value, base):
            described["value"] = base(value)
    return described


def describe_tensor(tensor: Any) -> dict[str, Any]:
    return {
        "tensor": {
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
            "elements": tensor.numel(),
            "storage_offset": tensor.storage_offset(),
            "storage_bytes": tensor.untyped_storage().nbytes(),
        }
    }


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """What one run has found."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise LookupError("free-threaded builds are not supported")
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8 or sys.byteorder != "little":
        raise LookupError("only 64-bit little-endian CPython is supported")
    tuple_items = probe_tuple()
    kinds, dicts = probe_types(), probe_dicts()
    instances, split, kinds["cached_keys"] = probe_instances(dicts)
    frames, topmost = probe_frames()
    layout = {
        "version": list(VERSION),
        "types": kinds,
        "numbers": probe_numbers(),
        "text": probe_text(),
        "sequences": probe_sequences(tuple_items),
        "dicts": dicts | split,
        "instances": instances,
        "misc": probe_misc(),
        "code": probe_code(kinds["of_object"], tuple_items),
        "frames": frames,
        "runtime": probe_runtime() | topmost,
    }
    found: dict[str, Any] = {"layout": layout, "torch": None}
    corpus = [[id(keep(value)), describe(value)] for value in corpus_values()]
    if request.get("torch"):
        found["torch"], tensors = probe_torch()
        corpus += [[id(tensor), describe_tensor(tensor)] for tensor in tensors]
    found["corpus"] = corpus
    return found


def main() -> None:
    request = json.loads(sys.stdin.readline())
    if request.get("sys_path"):
        sys.path[:] = request["sys_path"]
    answer_to = os.fdopen(os.dup(1), "w")
    # Whatever an imported package prints must not mix with the answer.
    os.dup2(2, 1)
    try:
        answer = measure(request)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    answer_to.write(json.dumps(answer) + "\n")
    answer_to.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
