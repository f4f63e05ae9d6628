"""What `check` advises for a full pool is what `sgdiag kv --what-if` computes for the same flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.analysis.kv.budget import budget_of, tightest
from sgdiag.analysis.kv.whatif import Change, Outcome, what_if
from sgdiag.model import Advice, Known, KvPool, Rank, RankId, RankMemory, Server, Snapshot, unknown
from sgdiag.resources import recording
from sgdiag.rules import evaluate
from sgdiag.session.recording import read_frames

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def full(
    *, held: float, tokens: int, cap: int | None = None, fraction: float = 0.8, page: int = 1, **gib: float
) -> Snapshot:
    """A full pool of ``tokens`` in ``held`` GiB: of 80 GiB, 36 are left after loading. The request table takes 1, what
    comes after the pools 5."""
    inside = gib.pop("inside", 1.0)
    facts = {"free_before_load": 80, "free_after_load": 36, **gib}
    pools = held + facts.get("draft_pool", 0) * inside + facts.get("state_pool", 0)
    facts.setdefault("free_after_pool", facts["free_after_load"] - pools - 1)
    facts.setdefault("free_at_ready", facts["free_after_pool"] - 5)
    memory = {f"{name}_bytes": known(round(value * GIB)) for name, value in facts.items()}
    if "draft_pool" in facts:
        memory["draft_in_budget"] = known(bool(inside))
    kv = KvPool(
        usage_ratio=known(1.0),
        capacity_tokens=known(tokens),
        page_size_tokens=known(page),
        dtype=known("torch.bfloat16"),
        size_bytes=known(round(held * GIB)),
    )
    server = Server(mem_fraction_static_ratio=known(fraction), args=known({"max_total_tokens": cap}))
    return Snapshot(server=server, ranks=(Rank(id=RankId(), kv=kv, memory=RankMemory(**memory)),))


def demo() -> Snapshot:
    return list(read_frames(recording("demo.sgdiag")))[-1]


def uneven() -> Snapshot:
    """Two workers of one pool size; the second, whose load nobody tells, has 2 GiB less for it."""
    wide, narrow = full(held=4, tokens=4_000, cap=4_000), full(held=4, tokens=4_000, cap=4_000, free_after_load=34)
    second = msgspec.structs.replace(
        narrow.ranks[0],
        id=RankId(dp=1),
        kv=msgspec.structs.replace(narrow.ranks[0].kv, usage_ratio=unknown("no metrics")),
    )
    return msgspec.structs.replace(wide, ranks=(wide.ranks[0], second))


CASES = {
    "memory holds no more": full(held=20, tokens=20_000),
    "pages": full(held=20, tokens=19_968, page=64),
    "a cap": full(held=4, tokens=4_000, cap=4_000),
    "a cap and pages": full(held=4, tokens=3_968, cap=4_000, page=64),
    "a cap that is all that memory holds": full(held=20, tokens=20_000, cap=20_000),
    "a cap above the pool": full(held=20, tokens=20_000, cap=21_000),
    "a draft": full(held=16, tokens=16_000, draft_pool=4, draft_weights=1),
    "a draft and a cap": full(held=4, tokens=4_000, cap=4_000, draft_pool=1, draft_weights=1),
    "a draft beside the budget and a cap": full(held=4, tokens=4_000, cap=4_000, draft_pool=1, inside=0),
    "states and a cap": full(held=4, tokens=4_000, cap=4_000, state_pool=5),
    "a cap that keeps the rest alive": full(held=4, tokens=4_000, cap=4_000, fraction=0.95),
    "workers with different memory": uneven(),
    "the demo": demo(),
}


def advice(snapshot: Snapshot) -> list[Advice]:
    (finding,) = (one for one in evaluate(snapshot) if one.id == "kv-pool-exhausted")
    return [one for one in finding.advice if re.search("--(max-total|mem-frac|kv-cache)", one.command)]


def asked(snapshot: Snapshot, command: str) -> Outcome:
    words = command.split()
    changes = tuple(Change(flag.removeprefix("--"), value) for flag, value in zip(words[::2], words[1::2], strict=True))
    return what_if(snapshot, budget_of(snapshot, shown(snapshot)), changes)


def shown(snapshot: Snapshot) -> Rank:
    """The rank whose balance `sgdiag kv` shows."""
    tight = tightest(snapshot.ranks)
    assert tight is not None
    return tight


def promised(one: Advice) -> tuple[int, bool]:
    """The tokens that it promises, and whether they come on top of those that are there."""
    found = re.search(r"about ([\d,]+) (more )?tokens", one.effect)
    assert found is not None, one.effect
    return int(found[1].replace(",", "")), bool(found[2])


def keeps_its_promise(snapshot: Snapshot) -> None:
    rank = shown(snapshot)
    now = rank.kv.capacity_tokens.or_else(0)
    free = budget_of(snapshot, rank).term("free-at-ready").or_else(0)
    for one in advice(snapshot):
        outcome = asked(snapshot, one.command)
        tokens, on_top = promised(one)
        assert outcome.capacity_tokens.or_else(0) == tokens + now * on_top, one
        assert outcome.capacity_tokens.or_else(0) > now, "no advice that gains nothing"
        cap = re.search(r"--max-total-tokens (\d+)", one.command)
        if cap:
            assert outcome.capacity_tokens.or_else(0) == int(cap[1]), "SGLang would clip the value"
        if "mem-fraction" in one.command:
            assert outcome.free_bytes.or_else(0) >= free // 2 - GIB // 20, "half of what was free is left"
        if "kv-cache" not in one.command:
            assert outcome.free_bytes.or_else(0) >= 0, "what comes after the pools fits"


@pytest.mark.parametrize("name", CASES)
def test_the_advised_value_gives_what_is_promised(name: str) -> None:
    assert advice(CASES[name])
    keeps_its_promise(CASES[name])


@given(
    held=st.integers(1, 30),
    draft=st.sampled_from([0.0, 0.5, 3.0]),
    inside=st.sampled_from([0.0, 1.0]),
    capped=st.sampled_from([None, 1.0, 1.3, 5.0]),
    fraction=st.floats(0.5, 0.99),
    page=st.sampled_from([1, 64]),
    later=st.floats(-1, 12),
)
def test_no_figures_break_a_promise(
    held: int, draft: float, inside: float, capped: float | None, fraction: float, page: int, later: float
) -> None:
    tokens = held * 1000 // page * page
    snapshot = full(
        held=held,
        tokens=tokens,
        cap=None if capped is None else int(held * 1000 * capped),
        fraction=round(fraction, 3),
        page=page,
        free_at_ready=36 - held - draft * inside - 1 - later,
        **({"draft_pool": draft, "inside": inside} if draft else {}),
    )
    keeps_its_promise(snapshot)


def commands(name: str) -> list[str]:
    return [one.command for one in advice(CASES[name])]


def test_the_draft_has_its_share_of_what_a_cap_held_back() -> None:
    # 36 GiB less 16 of slack are 20; 1,000 tokens have 1 GiB in the target's pool, a quarter of it in the draft's.
    assert commands("a cap") == ["--max-total-tokens 20000"]
    assert commands("a draft and a cap") == ["--max-total-tokens 16000"]


def test_more_memory_alone_does_not_lift_a_cap() -> None:
    assert all("--max-total-tokens" in command for command in commands("a cap that is all that memory holds"))


def test_eight_bits_are_no_advice_where_a_cap_keeps_memory_empty() -> None:
    assert not any("kv-cache" in command for command in commands("a cap"))
    assert any("kv-cache" in command for command in commands("memory holds no more"))


def test_the_eight_bit_type_is_the_one_that_every_attention_backend_reads() -> None:
    """FlashAttention 3 gives way to Triton for fp8_e5m2 in all releases from 0.5.9 to 0.5.23."""
    told = [*(ROOT / "playbooks").glob("*.md"), *(ROOT / "sgdiag/rules").rglob("*.py")]
    assert [path.name for path in told if "--kv-cache-dtype fp8_e5m2" in path.read_text()] == []
    assert any("--kv-cache-dtype fp8_e4m3" in command for command in commands("a draft"))
