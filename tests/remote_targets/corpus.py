"""A process full of objects of known content, for any CPython 3.10 to 3.14.

Prints one line once all is in place, then waits until stdin closes.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import sys
import types
import typing
import weakref


class Mode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2


class Null(enum.Enum):
    NULL = "null"


class Algorithm(enum.Flag):
    EAGLE = 1
    NGRAM = 2


class Triple(typing.NamedTuple):
    a: int
    b: str
    c: float


class Twins(tuple[object, ...]):
    _fields = ("same", "same")


@dataclasses.dataclass
class Draft:
    topk: int = 4
    steps: list[int] = dataclasses.field(default_factory=lambda: [1, 2, 3])


class SlotBase:
    __slots__ = ("unset", "x")

    def __init__(self) -> None:
        self.x = 17


class SlotChild(SlotBase):
    __slots__ = ("__dict__", "y")

    def __init__(self) -> None:
        super().__init__()
        self.y = "why"
        self.extra = [1, 2]


class IntChild(int):
    pass


class TextChild(str):
    pass


class DictChild(dict):  # type: ignore[type-arg]
    pass


class Small:
    def __init__(self, n: int) -> None:
        self.n = n
        self.name = f"small-{n}"


class Many:
    """More attributes than shared keys have room for."""

    def __init__(self) -> None:
        for i in range(90):
            setattr(self, f"field_{i:02d}", i)


class module:  # noqa: N801
    """A class whose name is that of a built-in type."""

    def __init__(self) -> None:
        self.inside = "mine"


class Base:
    inherited = "from the base"
    shadowed = "base"


class Properties(Base):
    shadowed = "child"

    def __init__(self) -> None:
        self._value = 41
        self.inner = Small(6)

    @property
    def value(self) -> int:
        return self._value

    @property
    def documented(self) -> str:
        """What the inner one is called."""
        return self.inner.name

    @functools.lru_cache  # noqa: B019
    def cached(self) -> int:
        return self._value

    @property
    def computed(self) -> int:
        return self._value + 1

    @property
    def chained(self) -> int:
        return self.value

    def method(self) -> int:
        return self._value


class Holder:
    """Everything, by attribute."""

    def __init__(self) -> None:
        self.none = None
        self.true, self.false = True, False
        self.zero, self.one, self.minus = 0, 1, -1
        self.digit_edge, self.two_digits = (1 << 30) - 1, 1 << 30
        self.big, self.negative = 1 << 200, -(1 << 333) + 17
        self.half, self.infinite, self.not_a_number = 0.5, float("inf"), float("nan")
        self.imaginary = 1.5 - 2j
        self.ascii, self.latin, self.wide, self.astral = "plain", "\xe9t\xe9", "\u4e16\u754c", "\U0001f600!"
        self.surrogate = "\udc80"
        self.empty_text = ""
        self.control = "\x1b[31m\0red"
        self.huge_text = "x" * 1_000_000
        self.octets, self.no_octets = b"\0\1\xff", b""
        self.mutable = bytearray(b"cut me")
        del self.mutable[:4]
        self.items: list[object] = [1, "two", None]
        self.no_items: list[object] = []
        self.nested = [[1, [2, [3, [4]]]]]
        self.pair = (1, "x")
        self.million = list(range(10_000_000)) if "--large" in sys.argv else [0] * 1000
        self.large_dict = {i: -i for i in range(100_000)}
        self.large_set = set(range(50_000))
        self.mixed = {"s": 1, 2: "two", (3,): [3], None: None, -1: "minus", 1 << 70: "big key"}
        self.holes = {f"k{i}": i for i in range(20)}
        for i in range(0, 20, 2):
            del self.holes[f"k{i}"]
        self.numbers = {1, 2, 3}
        self.frozen = frozenset(["a"])
        self.queue = collections.deque(range(300), maxlen=400)
        for _ in range(70):
            self.queue.popleft()
        self.ordered = collections.OrderedDict(b=1, a=2)
        self.default = collections.defaultdict(list, k=[1])
        self.counter = collections.Counter("aab")
        self.dict_child = DictChild(k=1)
        self.dict_child.attribute = 9  # type: ignore[attr-defined]
        self.span, self.cut = range(2, 20, 3), slice(1, None, 2)
        self.tokens = array.array("q", [5, -6, 7])
        self.mode, self.null, self.both = Mode.DECODE, Null.NULL, Algorithm.EAGLE | Algorithm.NGRAM
        self.triple = Triple(1, "two", 3.0)
        self.twins = Twins((1, "two"))
        self.draft = Draft()
        self.slotted = SlotChild()
        self.int_child = IntChild(42)
        self.int_child.note = "attached"  # type: ignore[attr-defined]
        self.text_child = TextChild("sub")
        self.small = [Small(i) for i in range(5)]
        self.late = Small(99)
        self.late.__dict__["added"] = "later"
        self.replaced = Small(7)
        self.replaced.__dict__ = {"n": 8, "other": 9}
        self.many = Many()
        self.namespace = types.SimpleNamespace(k=1)
        self.named_module = module()
        self.properties = Properties()
        self.function, self.lambda_ = serve, lambda: None
        self.bound = self.properties.method
        self.partial = functools.partial(serve, None)
        self.reference = weakref.ref(self.draft)
        self.kind, self.package = Small, collections
        self.cycle: list[object] = []
        self.cycle.append(self.cycle)
        self.me = self
        self.generator = (i for i in range(3))
        self.lock_like = object()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(holder: Holder | None) -> None:
    captured = Small(123)

    def closure() -> Small:
        return captured

    say("ready")
    sys.stdin.read()
    closure()


if __name__ == "__main__":
    serve(Holder())
