"""A cap on the pool's tokens that is too small for any request, or for a single page."""

from __future__ import annotations

from sgdiag.model import Advice, Evidence, Finding, Incident, Known, Sighting
from sgdiag.rules.postmortem.registry import Explanation, explains


def cap_below_page(incident: Incident) -> Sighting | None:
    """Where the server ended without a pool because --max-total-tokens, rounded down to whole pages, is nothing."""
    at = incident.first("no-pool-memory")
    cap, page = _argument(incident, "max_total_tokens"), _argument(incident, "page_size")
    return at if cap is not None and page is not None and cap < page else None


@explains("token-cap-too-small")
def token_cap_too_small(incident: Incident) -> Explanation | None:
    cap = _argument(incident, "max_total_tokens")
    if cap is None:
        return None
    at = cap_below_page(incident)
    if at is not None:
        page = _argument(incident, "page_size")
        cause = (
            f"the pool consists of whole pages: {cap:,} tokens, rounded down to pages of {page:,}, are none. Memory "
            "was not what was missing"
        )
        told = "SGLang asks for a higher fraction, which changes nothing: the cap is applied after it"
    else:
        refused = _warm_up_refused(incident)
        if refused is None:
            return None
        at = refused
        cause = (
            f"the pool of {cap:,} tokens lets in prompts of {refused.fields['limit']} tokens, and the server's own "
            f"warm-up request has {refused.fields['length']}"
        )
        told = "'use a shorter input' is meant for clients; this input was the server's own"
    arguments = incident.snapshot.server.args
    finding = Finding(
        id="token-cap-too-small",
        title="--max-total-tokens leaves no usable pool",
        verdict="FAIL",
        family="kv-pool-no-room",
        confidence=0.95,
        evidence=(
            at.evidence(),
            *((Evidence(arguments.source, f"--max-total-tokens {cap}"),) if isinstance(arguments, Known) else ()),
        ),
        cause=cause,
        told=told,
        advice=(
            Advice(
                "leave the cap out",
                "remove --max-total-tokens",
                "the pool becomes as large as --mem-fraction-static allows",
            ),
            Advice(
                "or raise it to what the longest requests that run together need",
                "--max-total-tokens HIGHER",
                "a pool of that many tokens, rounded down to whole pages",
            ),
        ),
    )
    return Explanation(finding, at, "cause")


def _warm_up_refused(incident: Incident) -> Sighting | None:
    at = incident.first("prompt-too-long")
    return at if at is not None and not incident.ready and incident.first("warm-up-failed") is not None else None


def _argument(incident: Incident, name: str) -> int | None:
    value = incident.snapshot.server.args.or_else({}).get(name)
    return value if isinstance(value, int) and value > 0 else None
