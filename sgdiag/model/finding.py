"""What a rule concluded, with the evidence that it stands on."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Verdict: TypeAlias = Literal["PASS", "WARN", "FAIL", "UNKNOWN"]

SEVERITY: tuple[Verdict, ...] = ("FAIL", "WARN", "UNKNOWN", "PASS")
"""Verdicts, worst first."""


class Evidence(msgspec.Struct, frozen=True):
    """One observation: where it was made (a fact's source) and what it said."""

    source: str
    text: str


class Advice(msgspec.Struct, frozen=True):
    """One thing to do: in words, the exact flag or command if there is one, and what should change."""

    action: str
    command: str = ""
    effect: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One conclusion about one server. ``confidence`` runs from 0 to 1; at least 0.8 counts as high."""

    id: str
    title: str
    verdict: Verdict
    confidence: float = 1.0
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    advice: tuple[Advice, ...] = ()
    playbook: str = ""
    fix: str = ""
