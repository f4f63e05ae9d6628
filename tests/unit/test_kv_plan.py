"""Plans for models made here: what follows from files and flags is exact, the rest lies in the ranges."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.kv.plan import Plan
from sgdiag.analysis.kv.weights import LOADING_SURPLUS_BYTES, weights_of
from sgdiag.cli import cli
from sgdiag.model import Known, SgdiagError, Unknown
from sgdiag.model.shape import Parallel, Weight
from sgdiag.releases.models.configs import shape_of
from sgdiag.sources.model_files import ModelFiles
from sgdiag.sources.model_plan import Flags, plan_of, with_flag
from tests.unit.made_models import DELTA_NET, DENSE, LATENT, WINDOWS, write_model, write_tensors

GIB = 2**30


def tensor(name: str, *shape: int, dtype: str = "BF16", width: int = 2) -> Weight:
    return Weight(name, dtype, math.prod(shape), math.prod(shape) * width, len(shape))


def dense_weights(config: dict[str, Any], inner: int = 14336, vocabulary: int = 128256) -> tuple[Weight, ...]:
    """The tensors of a dense model with that configuration."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    kv = config["num_key_value_heads"]
    found = [tensor("model.embed_tokens.weight", vocabulary, hidden), tensor("lm_head.weight", vocabulary, hidden)]
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        found += [
            tensor(f"{place}.self_attn.q_proj.weight", heads * dim, hidden),
            tensor(f"{place}.self_attn.k_proj.weight", kv * dim, hidden),
            tensor(f"{place}.self_attn.v_proj.weight", kv * dim, hidden),
            tensor(f"{place}.self_attn.o_proj.weight", hidden, heads * dim),
            tensor(f"{place}.mlp.gate_proj.weight", inner, hidden),
            tensor(f"{place}.mlp.up_proj.weight", inner, hidden),
            tensor(f"{place}.mlp.down_proj.weight", hidden, inner),
            tensor(f"{place}.input_layernorm.weight", hidden),
        ]
    return tuple(found)


def files_of(config: dict[str, Any], **sizes: int) -> ModelFiles:
    return ModelFiles(folder=Path("/model"), config=config, weights=dense_weights(config, **sizes))


def planned(
    config: dict[str, Any] = DENSE, release: str = "0.5.23", gib: float = 80, free_gib: float | None = 79, **flags: Any
) -> Plan:
    free = None if free_gib is None else round(free_gib * GIB)
    return plan_of(files_of(config), round(gib * GIB), Flags(**flags), release, free_before_load_bytes=free)


def span(fact: object) -> Span:
    assert isinstance(fact, Known), fact
    value: Span = fact.value
    return value


def term(plan: Plan, name: str) -> Span:
    return next(one.bytes for one in plan.terms if one.name == name)


def test_weights_split_over_tensor_ranks_and_repeat_where_heads_run_out() -> None:
    shape = shape_of(DENSE, "0.5.23")
    whole = weights_of(dense_weights(DENSE), shape, Parallel())[0].target_bytes
    total = sum(one.size_bytes for one in dense_weights(DENSE))
    assert whole.low == total
    assert whole.high == total + LOADING_SURPLUS_BYTES.high
    norms = 32 * 4096 * 2
    quarter = weights_of(dense_weights(DENSE), shape, Parallel(tp=4))[0].target_bytes
    assert quarter.low == (total - norms) / 4 + norms
    sixteenth = weights_of(dense_weights(DENSE), shape, Parallel(tp=16))[0].target_bytes
    kv = 32 * 2 * 8 * 128 * 4096 * 2
    assert sixteenth.low == (total - norms - kv) / 16 + norms + kv / 8, "8 heads on 16 ranks: each keeps one"


def test_weights_of_pipeline_stages_add_up() -> None:
    shape = shape_of(DENSE, "0.5.23")
    stages = weights_of(dense_weights(DENSE), shape, Parallel(pp=3))
    assert sum(one.target_bytes.low for one in stages) == sum(one.size_bytes for one in dense_weights(DENSE))
    assert len(stages) == 3


def test_a_tied_head_is_loaded_only_where_no_embedding_is() -> None:
    shape = msgspec.structs.replace(shape_of(DENSE, "0.5.23"), tied_embeddings=True)
    ends = [tensor("model.embed_tokens.weight", 1000, 4096), tensor("lm_head.weight", 1000, 4096)]
    one, size = weights_of(ends, shape, Parallel()), 1000 * 4096 * 2
    assert [stage.target_bytes.low for stage in one] == [size]
    three = weights_of(ends, shape, Parallel(pp=3))
    assert [stage.target_bytes.low for stage in three] == [size, 0, 2 * size]


def test_a_fused_projection_repeats_keys_and_values_where_heads_run_out() -> None:
    shape = shape_of(DENSE, "0.5.23")
    fused = tensor("model.layers.0.self_attn.qkv_proj.weight", (32 + 2 * 8) * 128, 4096)
    head = 128 * 4096 * 2
    for ranks, heads in ((1, 32 + 2 * 8), (8, 4 + 2), (16, 2 + 2)):
        assert weights_of([fused], shape, Parallel(tp=ranks))[0].target_bytes.low == heads * head


def test_layers_for_prediction_and_unused_tensors_are_set_apart() -> None:
    shape = shape_of(LATENT, "0.5.23")
    found = weights_of(
        [
            tensor("model.layers.60.mlp.experts.7.up_proj.weight", 2048, 7168, dtype="F8_E4M3", width=1),
            tensor("model.layers.61.mlp.experts.7.up_proj.weight", 2048, 7168, dtype="F8_E4M3", width=1),
            tensor("mtp.fc.weight", 10, 10),
            tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 64, dtype="F32", width=4),
            tensor("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 576, 7168),
        ],
        shape,
        Parallel(tp=8),
    )[0]
    assert found.target_bytes.low == 2048 * 7168 / 8 + 576 * 7168 * 2, "the latent projection repeats on every rank"
    assert found.draft_bytes.low == 2048 * 7168 / 8 + 100 * 2 / 8


def test_a_float32_checkpoint_is_served_in_16_bits_but_scales_are_kept() -> None:
    shape = shape_of(DENSE, "0.5.23")
    found = weights_of(
        [
            tensor("model.layers.0.mlp.up_proj.weight", 64, 64, dtype="F32", width=4),
            tensor("model.layers.0.mlp.up_proj.weight_scale_inv", 64, 64, dtype="F32", width=4),
        ],
        shape,
        Parallel(),
    )[0]
    assert found.target_bytes.low == 64 * 64 * 2 + 64 * 64 * 4


def test_the_pool_is_what_weights_and_slack_leave() -> None:
    plan = planned(mem_fraction_static=0.9)
    weights = sum(one.size_bytes for one in dense_weights(DENSE))
    high = math.floor((79 * GIB * 0.9 - weights) / 131072)
    low = math.floor((79 * GIB * 0.9 - weights - LOADING_SURPLUS_BYTES.high) / 131072)
    assert plan.pool_tokens.high == pytest.approx(high, abs=1)
    assert plan.pool_tokens.low == pytest.approx(low, abs=1)
    assert plan.per_token_bytes == 131072
    assert term(plan, "slack").low == pytest.approx(-7.9 * GIB)
    balance = sum(one.bytes.high for one in plan.terms if one.name in ("free before load", "slack", "weights"))
    assert balance == pytest.approx(-term(plan, "KV pool").low, abs=131072)


def test_what_is_not_known_before_widens_the_range() -> None:
    told, untold = planned(mem_fraction_static=0.9), planned(mem_fraction_static=0.9, free_gib=None)
    assert untold.pool_tokens.low < told.pool_tokens.low
    assert untold.pool_tokens.high > told.pool_tokens.high
    assert term(planned(free_gib=None, tp_size=8), "free before load").low < term(untold, "free before load").low


@pytest.mark.parametrize(("ranks", "least", "most"), [(1, 0.6, 1.3), (2, 1.2, 3.2)])
def test_contexts_and_communicators_take_their_share_before_anything_is_loaded(
    ranks: int, least: float, most: float
) -> None:
    free = term(planned(gib=80, free_gib=None, tp_size=ranks), "free before load")
    assert (free.low, free.high) == pytest.approx(((80 - most) * GIB, (80 - least) * GIB))


def test_pages_caps_and_running_requests() -> None:
    assert planned(mem_fraction_static=0.9, page_size=64).pool_tokens.low % 64 == 0
    capped = planned(mem_fraction_static=0.9, max_total_tokens=1001, page_size=2)
    assert (capped.pool_tokens.low, capped.pool_tokens.high) == (1000, 1000)
    assert capped.running_requests.high == 500, "half the tokens"
    old = planned(release="0.5.9", mem_fraction_static=0.9, max_total_tokens=1001)
    assert old.running_requests.high == 4096, "0.5.9 counts requests before the limit on tokens"
    assert planned(mem_fraction_static=0.9, max_running_requests=7).running_requests.high == 7
    attended = planned(mem_fraction_static=0.9, max_running_requests=64, tp_size=8, dp_size=4, enable_dp_attention=True)
    assert attended.running_requests.high == 16
    assert planned(speculative_algorithm="NGRAM", mem_fraction_static=0.9).running_requests.high == 48


@pytest.mark.parametrize(("release", "running"), [("0.5.9", 5000), ("0.5.10", 4096), ("0.5.14", 5000)])
def test_a_limit_on_requests_is_taken_as_each_release_takes_it(release: str, running: int) -> None:
    """As it is; at most what the pool is estimated to hold; at most half the tokens."""
    assert planned(release=release, mem_fraction_static=0.9, max_running_requests=5000).running_requests.high == running


def test_a_model_without_states_or_images_has_no_terms_for_them() -> None:
    names = {one.name for one in planned().terms}
    assert not names & {"state pool", "multimodal reservation", "draft weights"}
    assert isinstance(planned().state_slots, Unknown)


def test_the_smallest_fraction_is_where_weights_end() -> None:
    plan = planned()
    weights = sum(one.size_bytes for one in dense_weights(DENSE))
    smallest = span(plan.smallest_fraction)
    assert smallest.low == pytest.approx(weights / (79 * GIB), abs=0.002)
    at, below = (planned(mem_fraction_static=smallest.low - step) for step in (0, 0.001))
    assert at.pool_tokens.high > 0
    assert below.pool_tokens.high == 0
    full = span(plan.full_context_fraction)
    assert planned(mem_fraction_static=full.high).pool_tokens.low >= 8192
    assert planned(mem_fraction_static=full.low - 0.001).pool_tokens.high < 8192


def test_a_model_that_does_not_fit_says_so() -> None:
    plan = planned(gib=12, free_gib=11)
    assert isinstance(plan.smallest_fraction, Unknown)
    assert plan.pool_tokens.high == 0
    long = planned(gib=24, free_gib=23, context_length=10**6)
    assert isinstance(long.smallest_fraction, Known)
    assert isinstance(long.full_context_fraction, Unknown)
    assert "1,000,000 tokens" in long.full_context_fraction.reason


def test_the_default_and_the_largest_fraction_are_one_where_no_floor_applies() -> None:
    plan = planned(gib=80, free_gib=None)
    assert not plan.fraction_chosen
    largest = span(plan.largest_fraction)
    assert largest.low == pytest.approx(plan.fraction.low, abs=0.002)
    assert largest.high == pytest.approx(plan.fraction.high, abs=0.002)


@pytest.fixture
def draft_files(tmp_path: Path) -> ModelFiles:
    config = {**DENSE, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    folder = write_model(tmp_path / "draft", config)
    return ModelFiles(folder=folder, config=config, weights=dense_weights(config))


def test_a_draft_is_inside_the_budget_from_0_5_14_on(draft_files: ModelFiles) -> None:
    flags = Flags(mem_fraction_static=0.8, speculative_algorithm="EAGLE3", speculative_num_draft_tokens=4)

    def plan(release: str) -> Plan:
        return plan_of(
            files_of(DENSE), 80 * GIB, flags, release, draft_files=draft_files, free_before_load_bytes=79 * GIB
        )

    before, after = plan("0.5.13"), plan("0.5.14")
    assert before.per_token_bytes == 131072
    assert after.per_token_bytes == 131072 * 33 / 32
    assert before.pool_tokens.low > after.pool_tokens.high
    assert span(before.largest_fraction).high < span(after.largest_fraction).low
    assert before.running_requests.high == 48
    with pytest.raises(SgdiagError, match="draft"):
        plan_of(files_of(DENSE), 80 * GIB, flags, "0.5.23")


def test_states_share_what_is_left_with_tokens() -> None:
    plan = planned(DELTA_NET, release="0.5.9", mem_fraction_static=0.8)
    states = span(plan.state_slots)
    tokens = plan.pool_tokens.high * plan.per_token_bytes
    assert -term(plan, "state pool").low / tokens == pytest.approx(0.9, rel=0.01)
    assert plan.running_requests.high == min(states.high // 3, 2048)
    padded = planned(DELTA_NET, release="0.5.17", mem_fraction_static=0.8)
    assert span(padded.state_slots).high == states.high - 1
    alone = planned(DELTA_NET, mem_fraction_static=0.8, disable_radix_cache=True, max_running_requests=32)
    assert span(alone.state_slots).high == 32
    assert alone.running_requests.high == 32


def test_windows_get_their_share_of_tokens() -> None:
    plan = planned(WINDOWS, mem_fraction_static=0.8, swa_full_tokens_ratio=0.25)
    assert span(plan.window_tokens).high == plan.pool_tokens.high // 4
    assert isinstance(planned(mem_fraction_static=0.8).window_tokens, Unknown)


def test_more_fraction_means_more_pool_and_never_less() -> None:
    tokens = [planned(DELTA_NET, mem_fraction_static=0.05 * step).pool_tokens for step in range(1, 20)]
    assert all(low.low <= high.low and low.high <= high.high for low, high in pairwise(tokens))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mem-fraction-static", "is not FLAG=VALUE"),
        ("mem-fraction-static=", "is not FLAG=VALUE"),
        ("mem-fraction-static=1.5", "<= 1"),
        ("mem-fraction-static=much", "expected a number"),
        ("max-total-tokens=1.5", "expected a whole number"),
        ("disable-radix-cache=maybe", "expected true or false"),
        ("tp-size=0", ">= 1"),
        ("page-size=-4", ">= 1"),
        ("colour=red", "is not computed"),
    ],
)
def test_a_wrong_flag_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"=|computed|--") as error:
        with_flag(Flags(), text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_flags_as_on_the_command_line() -> None:
    flags = with_flag(Flags(), "--mem-fraction-static=0.85")
    flags = with_flag(flags, "disable-radix-cache=true")
    flags = with_flag(with_flag(flags, "speculative-algorithm=EAGLE"), "speculative-algorithm=none")
    assert flags == Flags(mem_fraction_static=0.85, disable_radix_cache=True)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("--tp=4", Flags(tp_size=4)),
        ("tensor-parallel-size=4", Flags(tp_size=4)),
        ("--disable-radix-cache", Flags(disable_radix_cache=True)),
        ("speculative-algorithm=eagle", Flags(speculative_algorithm="EAGLE")),
    ],
)
def test_flags_by_the_names_that_sglang_takes(text: str, flags: Flags) -> None:
    assert with_flag(Flags(), text) == flags


def test_a_fraction_that_does_not_work_is_warned_of() -> None:
    assert not any("refuse" in note or "largest" in note for note in planned(mem_fraction_static=0.8).notes)
    assert "refuses to start" in planned(mem_fraction_static=0.05).notes[0]
    assert "above the largest fraction" in planned(mem_fraction_static=0.98).notes[0]


@pytest.mark.parametrize(("release", "words"), [("0.4.6", "older"), ("9.9.9", "newer")])
def test_a_release_that_was_not_checked_is_named(release: str, words: str) -> None:
    assert any(f"{release} is {words} than" in note for note in planned(release=release).notes)
    assert not any(" than what sgdiag" in note for note in planned().notes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", DENSE)
    tensors = {one.name: (one.dtype, [one.elements, 1], one.size_bytes) for one in dense_weights(DENSE)}
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["kv", *arguments])
    assert result.exception is None or isinstance(result.exception, (SystemExit, SgdiagError))
    problem = str(result.exception) if isinstance(result.exception, SgdiagError) else ""
    return result.exit_code, result.output + problem


def test_the_command_prints_a_plan_and_what_a_flag_would_change(model: Path) -> None:
    code, text = command(
        "--model", str(model), "--gpu-memory", "80GiB", "--tp", "2", "--what-if", "kv-cache-dtype=fp8_e4m3"
    )
    assert code == 0
    assert "65,536 bytes each" in text
    assert "what if --kv-cache-dtype fp8_e4m3" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("/")) <= 80
    code, text = command("--model", str(model), "--gpu-memory", "80", "--json", "--what-if", "tp-size=5")
    found = json.loads(text)
    assert found["plan"]["per_token_bytes"] == 131072
    assert found["plan"]["pool_tokens"]["low"] < found["plan"]["pool_tokens"]["high"]
    assert "do not divide" in found["what_if"][0]["problem"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "MODEL"), "--gpu-memory"),
        (("--model", "MODEL", "--gpu-memory", "lots"), "is not a size"),
        (("--model", "MODEL", "--gpu-memory", "0"), "is not a size"),
        (("--model", "MODEL", "--gpu-memory", "80", "--tp", "3"), "do not divide"),
        (("--model", "MODEL", "--gpu-memory", "80", "--release", "soon"), "is not a release"),
        (("--model", "MODEL", "--gpu-memory", "80", "--free-before-load", "81"), "exceeds"),
        (("--model", "MODEL", "--gpu-memory", "80", "--arg", "x=1"), "is not computed"),
        (("--model", "MODEL", "--gpu-memory", "80", "server.log"), "leave TARGET out"),
        (("--model", "/nowhere", "--gpu-memory", "80"), "/nowhere"),
        (("--gpu-memory", "80"), "with --model only"),
        (("--model", "MODEL", "--gpu-memory", "80", "--rank", "TP0"), "leave --rank out"),
        (("--model", "MODEL", "--gpu-memory", "80", "--no-exec"), "leave --no-exec out"),
        (("--model", "MODEL", "--gpu-memory", "80", "--draft-model", "MODEL"), "speculative-algorithm"),
        (("--model", "", "--gpu-memory", "80"), "no directory ''"),
        (("--model", "MODEL", "--gpu-memory", "1", "--arg", "mem-fraction-static=0.5"), "alone may take 1.3 GiB"),
        (("--model", "MODEL", "--gpu-memory", "3"), "smaller than what SGLang keeps free"),
    ],
)
def test_bad_usage_is_one_line(model: Path, arguments: tuple[str, ...], words: str) -> None:
    code, text = command(*(str(model) if one == "MODEL" else one for one in arguments))
    assert code != 0
    assert words in text
    assert "Traceback" not in text
