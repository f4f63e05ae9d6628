"""Which fix answers which finding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from sgdiag.fixes.catalogue import Catalogue, Delivery, Fix
from sgdiag.model import Finding, Snapshot
from sgdiag.rules import evaluate


def judge(snapshot: Snapshot) -> tuple[Finding, ...]:
    """The findings about ``snapshot``, the worst first, each with its fix."""
    return with_fixes(evaluate(snapshot), snapshot.server.release.or_else(""))


def with_fixes(findings: Sequence[Finding], release: str) -> tuple[Finding, ...]:
    """``findings``, each with the id of the fix that the catalogue has against it for this SGLang ``release``; where
    that is not known (empty), of one that helps in every release that it knows."""
    if not any(_is_bad(finding) for finding in findings):
        return tuple(findings)
    fixes = [(fix, (fix.delivery(release),) if release else tuple(fix.releases.values())) for fix in _shipped()]

    def answered(finding: Finding) -> Finding:
        for fix, ways in fixes:
            if finding.id in fix.findings and _is_bad(finding) and all(_helps(way, finding) for way in ways):
                return msgspec.structs.replace(finding, fix=fix.id)
        return finding

    return tuple(map(answered, findings))


@cache
def _shipped() -> tuple[Fix, ...]:
    return Catalogue().all()


def _is_bad(finding: Finding) -> bool:
    return finding.verdict in ("FAIL", "WARN")


def _helps(delivery: Delivery, finding: Finding) -> bool:
    """What takes a setting helps where the finding's own advice asks for it: the same symptom has other causes, too."""
    settings = {*delivery.flags, *delivery.environment}
    asked = " ".join(advice.command for advice in finding.advice)
    if delivery.how == "patch" and not settings:
        return True
    return delivery.how in ("native", "patch") and any(setting in asked for setting in settings)
