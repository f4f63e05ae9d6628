"""What a misspelt name in an attribute path may have been meant to be."""

from __future__ import annotations

from sgdiag.model import near
from sgdiag.remote import Group, Instance, Limits, Reader, Status
from sgdiag.remote.paths import Attribute, Index, Step, parse_path

MAX_NAMES = 2000
"""How many attributes of one object are looked through."""

_NAMES_ONLY = Limits(depth=1, items=MAX_NAMES, characters=16, objects=MAX_NAMES + 1, tensor_elements=0)


class Nearby:
    """Looks for near names among what objects hold themselves, in their dicts and slots; what their classes define
    (methods, properties) is not among it."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Reader, str], Group] = {}

    def of(self, reader: Reader, path: str) -> str:
        """``near it: …`` for the first name of ``path`` that its object lacks; empty where there is none near, and
        where no object was found to lack a name. Raises RemoteError."""
        parsed = parse_path(path)
        texts = [parsed.root]
        for step in parsed.steps:
            texts.append(f"{texts[-1]}{_spelt(step)}")
        group = self._groups.setdefault((reader, path), Group(texts, limits=_NAMES_ONLY))
        results = reader.read(group).results
        for step, before, text in zip(parsed.steps, texts, texts[1:], strict=False):
            if results[text].status is Status.ABSENT:
                holder = results[before].value
                names = [name for name, _ in holder.attributes] if isinstance(holder, Instance) else []
                return near(step.name, names) if isinstance(step, Attribute) else ""
        return ""


def _spelt(step: Step) -> str:
    if isinstance(step, Attribute):
        return f".{step.name}"
    return f"[{step.index}]" if isinstance(step, Index) else f'["{step.key}"]'
