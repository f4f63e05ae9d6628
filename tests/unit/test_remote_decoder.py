"""The decoder on memory that makes no sense: always a typed failure, never a crash, a hang or a flood of memory."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgdiag.remote import Execute, Group, Limits, Reader, Status, plain
from sgdiag.remote.calibrate import _table
from sgdiag.remote.errors import BadAddressError, CalibrationError, UnreadableError
from sgdiag.remote.frames import Frames
from sgdiag.remote.getters import getter_chain
from sgdiag.remote.layout import layout_from_json, torch_layout_from_json, torch_layout_to_json
from sgdiag.remote.lines import line_of
from sgdiag.remote.memory import Memory
from sgdiag.remote.objects import Objects
from sgdiag.remote.paths import Attribute, Index, Key, parse_path
from sgdiag.remote.recorder import Recorder
from sgdiag.remote.snapshot import Collector
from sgdiag.remote.tensors import Tensors
from sgdiag.remote.values import Decoder
from sgdiag.remote.walker import Walker
from tests.remote_targets.harness import name_of, pythons, running
from tests.unit.test_remote_objects import EXPECTED

BASE = 0x10000
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


class Image:
    """Stands for a process' memory: one range with the given content, and nothing else."""

    uses_proc_mem = True

    def is_device(self, address: int, size: int) -> bool:
        return False

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.bytes_read = 0

    def read(self, address: int, size: int) -> bytes:
        if address < BASE or size < 0 or address + size > BASE + len(self.content):
            raise BadAddressError(f"{address:#x}")
        self.bytes_read += size
        return self.content[address - BASE : address - BASE + size]


def random_image(seed: int, words: int = 2048) -> bytes:
    """Words that are numbers, pointers into the image, flags of types, or anything."""
    numbers = random.Random(seed)  # noqa: S311

    def word() -> int:
        kind = numbers.random()
        if kind < 0.25:
            return numbers.randrange(0, 64)
        if kind < 0.75:
            return BASE + 8 * numbers.randrange(words)
        if kind < 0.9:
            return 1 << 12 | 1 << numbers.randrange(2, 32) | 1 << numbers.randrange(24, 32)
        return numbers.getrandbits(64)

    return struct.pack(f"<{words}Q", *(word() for _ in range(words)))


def image_of_one_type(seed: int, flag: int, name: bytes) -> tuple[bytes, int]:
    """The same with a valid type in it, and an object of that type whose content is random."""
    content = bytearray(random_image(seed))
    kind, text, bases, thing = 0x1000, 0x1800, 0x1900, 0x2000
    struct.pack_into("<Q", content, kind + 8, BASE + kind)
    struct.pack_into("<QQQ", content, kind + 24, BASE + text, 64, 0)
    struct.pack_into("<Q", content, kind + 168, 1 << 12 | 1 << 31 | flag)
    struct.pack_into("<Q", content, kind + 344, BASE + bases)
    content[text : text + len(name) + 1] = name + b"\0"
    struct.pack_into("<QQQ", content, bases + 16, 1, BASE + kind, BASE + kind)
    struct.pack_into("<Q", content, thing + 8, BASE + kind)
    return bytes(content), BASE + thing


def exercise(image: Image, version: str, addresses: list[int]) -> int:
    """Everything that the decoder can do, at these addresses; how much of it came to something."""
    objects = Objects(Recorder(cast(Memory, image)), layout_from_json(_table(f"python-{version}")))
    decoder = Decoder(objects, Tensors(objects, torch_layout_from_json(_table("torch-2.13"))))
    walker = Walker(objects, cast(Any, None))
    frames = Frames(objects, BASE)
    limits = Limits(depth=4, items=50, objects=500)
    attempts: list[Callable[[], object]] = [frames.stacks, frames.modules, partial(frames.find_local, "f", "x")]
    for address in addresses:
        attempts += [partial(decoder.value, address, limits), partial(decoder.length, address)]
        attempts += [partial(frames._chain, address), partial(frames._read_code, address)]
        attempts += [partial(walker.follow, address, s) for s in (Attribute("x"), Index(0), Index(-1), Key("k"))]
    return sum(_comes_to_something(attempt) for attempt in attempts)


def _comes_to_something(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except UnreadableError:
        return False
    return True


@pytest.mark.parametrize("version", VERSIONS)
def test_random_memory_gives_typed_failures(version: str) -> None:
    for seed in range(6):
        image = Image(random_image(seed))
        exercise(image, version, [BASE + 8 * i for i in range(0, 2048, 16)])
        assert image.bytes_read < 64 << 20


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("flag", "name"),
    [
        *((1 << bit, b"any") for bit in (9, 24, 25, 26, 27, 28, 29)),
        *((0, name) for name in (b"set", b"float", b"complex", b"cell", b"range", b"slice", b"bytearray", b"weakref")),
        *((0, name) for name in (b"collections.deque", b"array.array", b"torch._C.TensorBase", b"functools.partial")),
        *((0, name) for name in (b"method", b"function", b"module", b"code", b"property", b"torch.dtype")),
        *((1 << 9 | 1 << 4 | extra, b"Thing") for extra in (0, 1 << 2)),
    ],
)
def test_random_content_of_a_known_type_gives_typed_failures(version: str, flag: int, name: bytes) -> None:
    began = time.monotonic()
    done = 0
    for seed in range(8):
        content, thing = image_of_one_type(seed, flag, name)
        image = Image(content)
        done += exercise(image, version, [thing])
        assert image.bytes_read < 64 << 20
    # The type itself is sound, so that the decoder got as far as the random content.
    assert done
    assert time.monotonic() - began < 20


class Corrupting:
    """A process' memory in which some of what is read is wrong, as pointers are that were read too late."""

    uses_proc_mem = True

    def is_device(self, address: int, size: int) -> bool:
        return False

    def __init__(self, memory: Memory, numbers: random.Random) -> None:
        self._memory = memory
        self._numbers = numbers
        self.process = memory.process
        self.bytes_read = 0
        self.rate = 0.0

    def read(self, address: int, size: int) -> bytes:
        data = bytearray(self._memory.read(address, size))
        self.bytes_read += size
        if size and self._numbers.random() < self.rate:
            at = self._numbers.randrange(size)
            wrong = self._numbers.choice((b"\0", b"\xff", bytes([self._numbers.randrange(256)])))
            width = self._numbers.choice((1, 8))
            data[at : at + width] = (wrong * width)[: len(data[at : at + width])]
        return bytes(data)


@pytest.mark.parametrize("python", pythons(), ids=name_of)
def test_corrupted_reads_of_a_live_process_give_typed_results(python: Any) -> None:
    with running(python, "corpus") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        root = reader.find_local("serve", "holder").address
        memory = Corrupting(Memory(reader.process), random.Random(7))  # noqa: S311
        paths = [f"holder.{path}" for path in EXPECTED] + ["holder.me", "holder.large_dict", "holder.cycle"]
        seen = set()
        for rate in (0.02, 0.2):
            recorder = Recorder(cast(Memory, memory))
            objects = Objects(recorder, reader.calibration.layout)
            collector = Collector(objects, Walker(objects, reader._getters), Decoder(objects, None))
            memory.rate = rate
            for _ in range(3):
                before = memory.bytes_read
                objects.forget()
                group = Group(paths, limits=Limits(depth=3, items=50))
                for result in collector.read(group, {"holder": root}, attempts=2, budget_s=0.2).results.values():
                    plain(result.value)
                    seen.add(result.status)
                assert memory.bytes_read - before < 256 << 20
        assert Status.TORN in seen
        assert target.process.poll() is None


@given(st.binary(max_size=200), st.integers(-5, 10_000), st.integers(0, 5000), st.sampled_from([(3, 10), (3, 12)]))
def test_any_table_of_lines_gives_a_number(table: bytes, first: int, offset: int, version: tuple[int, int]) -> None:
    assert isinstance(line_of(table, first, offset, version), int)


_LINES_PROGRAM = """
import json, sys, argparse, ast, collections, inspect, json.decoder, textwrap, types
codes = []
def collect(code):
    codes.append(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            collect(constant)
for module in (argparse, ast, collections, inspect, textwrap):
    with open(module.__file__) as file:
        collect(compile(file.read(), module.__file__, 'exec'))
print(json.dumps([[c.co_firstlineno, c.co_linetable.hex(), [list(r) for r in c.co_lines()]] for c in codes]))
"""


@pytest.mark.parametrize("python", pythons(), ids=name_of)
def test_lines_are_those_that_python_itself_gives(python: Any) -> None:
    found = subprocess.run([str(python), "-c", _LINES_PROGRAM], capture_output=True, text=True, check=True)
    minor = int(subprocess.check_output([str(python), "-c", "import sys; print(sys.version_info[1])"]))
    codes = json.loads(found.stdout)
    assert len(codes) > 300
    for first, table, ranges in codes:
        for start, end, line in ranges:
            for offset in {start, end - 2}:
                expected = first if line is None else line
                if end > start:
                    assert line_of(bytes.fromhex(table), first, offset, (3, minor)) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_what_is_no_layout_is_refused(data: Any) -> None:
    for read in (layout_from_json, torch_layout_from_json):
        with pytest.raises(CalibrationError):
            read(data)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_layout_with_one_wrong_entry_is_refused(data: st.DataObject) -> None:
    layout = _table("python-3.12")
    section = data.draw(st.sampled_from(sorted(set(layout) - {"format", "version"})))
    member = data.draw(st.sampled_from(sorted(layout[section])))
    layout[section][member] = data.draw(st.sampled_from([None, "8", 1.5, True, 1 << 40, -1000, [8]]))
    with pytest.raises(CalibrationError):
        layout_from_json(layout)


@pytest.mark.parametrize("version", VERSIONS)
def test_layouts_survive_json(version: str) -> None:
    layout = layout_from_json(_table(f"python-{version}"))
    assert layout.version == (3, int(version[2:]))
    assert layout_from_json(layout.to_json()) == layout
    torch = torch_layout_from_json(_table("torch-2.13"))
    assert torch_layout_from_json(torch_layout_to_json(torch)) == torch


SOURCE = '''
class A:
    @property
    def plain(self):
        return self._x

    @property
    def documented(self):
        """Several lines

        of text."""
        return self.a.b.c

    @property
    def computed(self):
        return self._x + 1

    @property
    def guarded(self):
        if self.y: return self._x
        return None

    @functools.cached_property
    def called(self): return self.f()

    @property
    def other(me): return me.x

    @property
    def foreign(self): return _globals.x
'''


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("plain", ("_x",)),
        ("documented", ("a", "b", "c")),
        ("computed", None),
        ("guarded", None),
        ("called", None),
        ("other", ("x",)),
        ("foreign", None),
    ],
)
def test_getters_are_understood_only_if_they_pass_on_an_attribute(name: str, chain: tuple[str, ...] | None) -> None:
    lines = SOURCE.splitlines()
    definition = next(i for i, line in enumerate(lines, 1) if f"def {name}(" in line)
    assert getter_chain(SOURCE, definition - 1, name) == chain
    assert getter_chain(SOURCE, definition - 1, "another") is None


@given(st.text(max_size=200), st.integers(-3, 50), st.text(max_size=5))
def test_any_source_is_survived(source: str, line: int, name: str) -> None:
    getter_chain(source, line, name)


def test_paths() -> None:
    path = parse_path(" scheduler._a[0][-1]['k.[x]'][\"\"].\xe9 ")
    assert path.root == "scheduler"
    assert path.steps == (Attribute("_a"), Index(0), Index(-1), Key("k.[x]"), Key(""), Attribute("\xe9"))
    assert not path.of_length
    assert parse_path("len(a.b)").of_length
    assert parse_path("len").root == "len"
