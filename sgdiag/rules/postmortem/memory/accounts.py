"""SGLang's own check of its slots: lost, or freed twice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from sgdiag.model import Advice, Evidence, Fault, Finding, Incident, Sighting
from sgdiag.releases.signs.figures import SlotAccount, slot_account
from sgdiag.rules.postmortem.registry import Explanation, explains

_ACCOUNT_WITHIN_LINES = 4

_SUSPECTS: tuple[tuple[str, str], ...] = (
    ("enable_mixed_chunk", "--enable-mixed-chunk"),
    ("speculative_algorithm", "--speculative-algorithm"),
    ("enable_hierarchical_cache", "--enable-hierarchical-cache"),
    ("disaggregation_mode", "--disaggregation-mode"),
    ("enable_streaming_session", "--enable-streaming-session"),
)
"""Features with which defects of this kind were found, and the flags to drop for a test."""


_BOOKS = re.compile(r"mem_cache/(?:allocator|allocation|common|chunk_cache|\w*radix_cache\w*)(?:\.py|/)")
_OTHERS_BOOKS = ("hicache", "hiradix", "host", "storage", "load_back", "write_back", "backup", "prefetch")
"""Frames of HiCache, which keeps books of its own in the same files."""

# The last alternatives are lines of the traceback itself, where its end is cut off.
_RAISED = re.compile(r"leak|^(?:ValueError|AssertionError|RuntimeError|File |\w+\.\w+\()|^$")
_BROKEN = re.compile(r"^(?:AssertionError|IndexError|KeyError)\b")


@explains("cache-bookkeeping-failed")
def cache_bookkeeping_failed(incident: Incident) -> Explanation | None:
    """An assertion or look-up that fails in the code that hands out and takes back slots while the server runs."""
    death = incident.first_death
    if death is None or death.echo or not death.frames or not _BROKEN.search(death.text):
        return None
    if not _BOOKS.search(death.frames[-1].file) or not death.passes("event_loop", "run_batch", "process_batch"):
        return None
    if death.passes(*_OTHERS_BOOKS):
        return None
    finding = Finding(
        id="cache-bookkeeping-failed",
        title="a check failed in the code that hands out the cache's slots",
        verdict="FAIL",
        family="kv-accounting-leak",
        confidence=0.65,
        evidence=(death.evidence(),),
        cause="a defect in SGLang's bookkeeping of the KV cache, in one of the features in use",
        told="a bare assertion; nothing about memory or flags can be read from it",
        advice=(
            *_without(incident.snapshot.server.args.or_else({})),
            Advice("upgrade: defects of this kind are fixed release by release", effect="the check passes"),
        ),
    )
    return Explanation(finding, death, "symptom")


@explains("slots-freed-twice", "slots-lost", "slots-do-not-add-up")
def slots_do_not_add_up(incident: Incident) -> Explanation | None:
    at = incident.first("slot-leak", "slot-freed-twice")
    if at is None:
        return _by_check(incident)
    accounts = [account for account in _accounts(incident, at) if account.surplus]
    twice = [account for account in accounts if account.surplus > 0]
    if at.sign == "slot-freed-twice" or twice:
        return Explanation(_finding(incident, at, "slots-freed-twice", twice), at, "cause")
    if accounts:
        return Explanation(_finding(incident, at, "slots-lost", accounts), at, "cause")
    return Explanation(_finding(incident, at, "slots-do-not-add-up", []), at, "cause")


def _accounts(incident: Incident, at: Sighting) -> Iterable[SlotAccount]:
    near = (
        one.fields["figures"]
        for one in incident.seen("slot-figures")
        if one.file == at.file and 0 <= one.line - at.line <= _ACCOUNT_WITHIN_LINES
    )
    # The old text has its figures on the line above the one that names the leak.
    above = (one.fields["figures"] for one in incident.seen("slot-figures") if one.line == at.line - 1)
    found = [account for text in (*near, *above) if (account := slot_account(text)) is not None]
    return dict.fromkeys(found) if found else ()


def _by_check(incident: Incident) -> Explanation | None:
    """SGLang's check of its slots raised something, whose text is missing."""
    at = incident.first("slot-check-frame")
    fault = incident.fault_at(at) if at is not None else None
    if at is None or incident.survived(at) or (fault is not None and not _may_be_the_check(fault)):
        return None
    finding = msgspec.structs.replace(_finding(incident, at, "slots-do-not-add-up", []), confidence=0.6)
    return Explanation(finding, at, "symptom")


def _may_be_the_check(fault: Fault) -> bool:
    """Whether the exception, if the log has it, is one that the check raises."""
    return fault.text == fault.where or bool(_RAISED.search(fault.text))


_TITLES = {
    "slots-freed-twice": "token slots were freed twice",
    "slots-lost": "token slots are lost",
    "slots-do-not-add-up": "SGLang's count of its slots does not add up",
}
_CAUSES = {
    "slots-freed-twice": "slots that are free twice, or free and in use, go to two requests: their answers mix",
    "slots-lost": "slots that nobody holds were not given back: the pool shrinks until the server restarts",
    "slots-do-not-add-up": "needs the figures beside the message to tell lost slots from slots that were freed twice",
}


def _finding(incident: Incident, at: Sighting, finding_id: str, accounts: list[SlotAccount]) -> Finding:
    args = incident.snapshot.server.args.or_else({})
    title = _TITLES[finding_id]
    if accounts and all(account.pool == "request" for account in accounts):
        title = title.replace("token slots", "rows of the request table")
    return Finding(
        id=finding_id,
        title=title,
        verdict="FAIL",
        family="kv-accounting-leak",
        confidence=0.95 if accounts or finding_id == "slots-freed-twice" else 0.9,
        evidence=(at.evidence(), *(_sum(at, account) for account in accounts)),
        cause=f"a defect in SGLang's bookkeeping; {_CAUSES[finding_id]}",
        told="'memory leak' means slots of the pool here, not device memory: no memory flag changes it",
        advice=(
            *_without(args),
            Advice("upgrade: defects of this kind are fixed release by release", effect="the check passes"),
            Advice(
                "find the step at which it happens",
                "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY=1",
                "the server stops at the first step that does not add up",
            ),
            *(
                (Advice("do not trust answers that were given since it began", "restart the server"),)
                if finding_id == "slots-freed-twice"
                else ()
            ),
        ),
    )


def _sum(at: Sighting, account: SlotAccount) -> Evidence:
    parts = [
        f"{number:,} {word}"
        for number, word in (
            (account.available, "free"),
            (account.evictable, "evictable"),
            (account.protected, "protected"),
            (account.held, "held"),
        )
        if number
    ]
    off = f"{abs(account.surplus):,} {'too many' if account.surplus > 0 else 'missing'}"
    return Evidence(f"{at.file}:{at.line}", f"{account.pool} pool: {' + '.join(parts)} of {account.total:,}: {off}")


def _without(args: dict[str, Any]) -> Iterable[Advice]:
    page_size = args.get("page_size")
    used = [flag for name, flag in _SUSPECTS if args.get(name) not in (None, False, "null", "")]
    if isinstance(page_size, int) and page_size > 1:
        used.append(f"--page-size {page_size}")
    if used:
        yield Advice(
            "run without one feature after the other, these first", "drop " + ", ".join(used), "the culprit is named"
        )
