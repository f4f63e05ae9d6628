"""Redaction of snapshots and of single texts, the same for as long as one ``Redactor`` lives."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from sgdiag.model import NOT_ASKED, Fact, Known, Snapshot
from sgdiag.releases.redaction import names
from sgdiag.releases.redaction.prompts import hide_prompts
from sgdiag.releases.redaction.standins import Kind, StandIns, Tally, is_stand_in
from sgdiag.releases.secrets import HIDDEN, redact_text

T = TypeVar("T")
Change = Callable[[str], str]

MAX_REMEMBERED = 50_000
"""Texts whose redacted form is kept: most of a snapshot is what the one before said, too."""

LEAST_SECRET, LEAST_SECRET_WORD = 8, 12
"""A secret of fewer characters, or letters, may be a word that means something else elsewhere, such as `disabled`."""

_TOKEN = re.compile(
    r"\b(?:nvapi-|xox[abprs]-|github_pat_|gho_|AKIA|ASIA|dop_v1_|r8_|ms-)[A-Za-z0-9_-]{12,256}"
    r"|\beyJ[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{8,4096}(?:\.[A-Za-z0-9_-]{0,4096})?"
)
"""Tokens that are known by their form, beside those that ``releases.secrets`` takes out wherever sgdiag reads."""

_VERSION = re.compile(r"\d[\w.+-]{0,40}")


class Private(msgspec.Struct, frozen=True, kw_only=True):
    """What is private on one machine and cannot be told from other words by its form or its place."""

    secrets: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()


def redact(snapshot: Snapshot, private: Private | None = None) -> Snapshot:
    """``snapshot`` without secrets, prompts and names of machines and people; see ``Redactor``."""
    return Redactor(private).snapshot(snapshot)


class Redactor:
    """Replaces what is private in snapshots by stand-ins: for one name always the same, so that the ranks of one host
    can still be told from those of another.

    Kept are numbers, flags, versions, names of models and files, pids and what every machine has: loopback addresses,
    names of network interfaces, words such as ``root``. A name that is met at a telling place (a URL, a home
    directory, NCCL's prefix) is from then on replaced wherever it stands, where it is distinct enough.
    ``only_secrets``: all but keys, tokens and passwords is kept.
    """

    def __init__(self, private: Private | None = None, *, only_secrets: bool = False) -> None:
        self.only_secrets = only_secrets
        self._stand_ins = StandIns()
        self._secret_words: set[str] = set()
        self._hosts: set[str] = set()
        self._users: set[str] = set()
        self._secret_pattern = self._host_pattern = self._user_pattern = _any_of(())
        self._seen: set[str] = set()
        self._done: dict[str, tuple[str | None, Counter[Kind]]] = {}
        if private is not None:
            self.learn(private)

    def snapshot(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot, fit to be shown to others."""
        self.look_at(snapshot)
        replace, server = msgspec.structs.replace, snapshot.server
        versions = {"packages": self._versions(server.packages), "pinned": self._versions(server.pinned)}
        rest = replace(snapshot, server=replace(server, packages=NOT_ASKED, pinned=NOT_ASKED))
        told = _changed(rest, self._text)
        return replace(told, server=replace(told.server, **versions))

    def text(self, text: str) -> str:
        """One text, such as a line of a log, fit to be shown to others."""
        self.look_at(text)
        return self._text(text)

    def texts(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Several texts; a name that any of them tells is replaced in all."""
        self.look_at(tuple(texts))
        return tuple(map(self._text, texts))

    def learn(self, private: Private) -> None:
        """Takes in what is private on one more machine, or has become known to be since."""
        known = len(self._hosts), len(self._users), len(self._secret_words)
        self._secret_words |= set(filter(_is_distinct_secret, private.secrets))
        for host in sorted(private.hosts):
            self._learn_host(host, given=True)
        for user in sorted(private.users):
            self._learn_user(user, given=True)
        if known != (len(self._hosts), len(self._users), len(self._secret_words)):
            self._forget()

    def report(self) -> dict[Kind, Tally]:
        """What was replaced so far, by kind; kinds of which there was nothing are left out."""
        return self._stand_ins.report()

    # Names

    def look_at(self, thing: object) -> None:
        """Learns the names in a snapshot or in texts, before any of it is changed: the first may name what only the
        last tells."""
        if self.only_secrets:
            return
        known = len(self._hosts), len(self._users)
        new: set[str] = set()

        def look(text: str) -> str:
            new.add(text)
            return text

        _changed(thing, look)
        if isinstance(thing, Snapshot):
            for host in _hosts_by_field(thing):
                self._learn_host(host, given=True)
        for text in new - self._seen:
            self._learn_from(text)
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.clear()
        self._seen |= new
        if known != (len(self._hosts), len(self._users)):
            self._forget()

    def _learn_from(self, text: str) -> None:
        for place in names.HOST_PLACES:
            for found in place.finditer(text):
                self._learn_host(found[1])
        for place in names.USER_PLACES:
            for found in place.finditer(text):
                self._learn_user(found[1])

    def _learn_host(self, name: str, *, given: bool = False) -> None:
        """``given``: known to be a host; else a word of letters alone may be another word at another place."""
        if not names.is_host(name):
            return
        for form in (name, name.partition(".")[0]):
            if names.is_distinct(form) and (given or not form.isalpha()):
                self._hosts |= {form, form.lower()}

    def _learn_user(self, name: str, *, given: bool = False) -> None:
        """``given`` as for hosts."""
        if names.is_user(name) and names.is_distinct(name) and (given or not name.isalpha()):
            self._users.add(name)

    def _forget(self) -> None:
        """What was redacted without the names that have been learned since is redacted anew."""
        self._done = {text: (None, replaced) for text, (_, replaced) in self._done.items()}
        self._secret_pattern = _any_of(self._secret_words)
        self._host_pattern = _any_of(self._hosts, whole=True)
        self._user_pattern = _any_of(self._users, whole=True)

    # Texts

    def _text(self, text: str) -> str:
        done, counted = self._done.get(text, (None, None))
        if done is None:
            if len(self._done) > MAX_REMEMBERED:
                self._done.clear()
            if counted:
                self._stand_ins.times.subtract(counted)
            before = self._stand_ins.times.copy()
            done = self._redacted(text)
            self._done[text] = done, self._stand_ins.times - before
        return done

    def _redacted(self, text: str) -> str:
        if not text or text in names.closed_words():
            return text
        text = self._without_secrets(text)
        return text if self.only_secrets else self._without_names(text)

    def _without_names(self, text: str) -> str:
        text = hide_prompts(text, self._stand_ins.prompt)
        text = names.DEVICE.sub(lambda found: self._device(found[0]), text)
        text = names.MAC.sub(lambda found: self._mac(found[0]), text)
        text = self._without_addresses(text)
        for place in names.USER_PLACES:
            text = place.sub(lambda found: _group(found, self._user), text)
        for place in names.HOST_PLACES:
            text = place.sub(lambda found: _group(found, self._host), text)
        text = self._host_pattern.sub(lambda found: self._stand_ins.host(found[0]), text)
        return self._user_pattern.sub(lambda found: self._stand_ins.user(found[0]), text)

    def _without_secrets(self, text: str) -> str:
        before = text.count(HIDDEN)
        text = _TOKEN.sub(HIDDEN, redact_text(self._secret_pattern.sub(HIDDEN, text)))
        if (hidden := text.count(HIDDEN) - before) > 0:
            self._stand_ins.secrets(hidden)
        return text

    def _without_addresses(self, text: str) -> str:
        parts, done = [], 0
        for start, end, address in sorted(names.addresses(text), key=lambda found: found[:2]):
            if start >= done:
                parts += [text[done:start], self._stand_ins.address(address)]
                done = end
        return "".join(parts) + text[done:]

    def _host(self, name: str) -> str:
        return self._stand_ins.host(name) if names.is_host(name) else name

    def _user(self, name: str) -> str:
        return self._stand_ins.user(name) if names.is_user(name) else name

    def _mac(self, address: str) -> str:
        return address if is_stand_in(address) else self._stand_ins.mac(address)

    def _device(self, uuid: str) -> str:
        return uuid if is_stand_in(uuid) else self._stand_ins.device(uuid)

    def _versions(self, fact: Fact[dict[str, str]]) -> Fact[dict[str, str]]:
        """Versions of packages, some of which look like addresses."""

        def change(text: str) -> str:
            return text if _VERSION.fullmatch(text) else self._text(text)

        return _changed(fact, change)


def _is_distinct_secret(secret: str) -> bool:
    return len(secret) >= (LEAST_SECRET_WORD if secret.isalpha() else LEAST_SECRET)


def _hosts_by_field(snapshot: Snapshot) -> Iterable[str]:
    """Hosts that stand alone in a field which is for them."""
    ras = snapshot.collectives.ras
    if isinstance(ras, Known):
        yield from (rank.host for communicator in ras.value.communicators for rank in communicator.ranks if rank.host)
    settings = [snapshot.server.args, snapshot.server.asked, snapshot.collectives.environment]
    settings += [process.environment for process in snapshot.processes]
    for fact in settings:
        if isinstance(fact, Known):
            for name, value in fact.value.items():
                if isinstance(value, str) and names.HOST_SETTINGS.search(name):
                    yield from names.hosts_of_setting(value)


def _changed(thing: T, change: Change) -> T:
    """``thing`` with each text in it changed, keys of dictionaries too; the same object where nothing is."""
    if isinstance(thing, str):
        return cast(T, change(thing))
    if thing is NOT_ASKED or isinstance(thing, int | float | None):
        return thing
    new: Any = thing
    if isinstance(thing, msgspec.Struct):
        changes = {}
        for name in thing.__struct_fields__:
            old = getattr(thing, name)
            inner = _changed(old, change)
            if inner is not old:
                changes[name] = inner
        new = msgspec.structs.replace(thing, **changes) if changes else thing
    elif isinstance(thing, dict):
        new = {_changed(key, change): _changed(value, change) for key, value in thing.items()}
        new = thing if new == thing else new
    elif isinstance(thing, tuple | list):
        items = [_changed(item, change) for item in thing]
        new = thing if all(map(operator.is_, items, thing)) else type(thing)(items)
    return cast(T, new)


def _group(found: re.Match[str], change: Change) -> str:
    """The match with its first group changed."""
    start, end = found.start(1) - found.start(), found.end(1) - found.start()
    return found[0][:start] + change(found[1]) + found[0][end:]


def _any_of(words: Collection[str], *, whole: bool = False) -> re.Pattern[str]:
    """One pattern for all ``words``, the longest first; ``whole``: not within a longer word, and no source file.
    Of none, it matches nothing."""
    either = "|".join(map(re.escape, sorted(words, key=lambda word: (-len(word), word)))) or r"(?!)"
    return re.compile(rf"(?<![A-Za-z0-9])(?:{either})(?![A-Za-z0-9]|\.(?:py|so|cu|cpp|h)\b)" if whole else either)
