"""Which rank holds how much of a tensor, by its name."""

from __future__ import annotations

from typing import Any

import pytest

from sgdiag.analysis.kv.weights import LOADING_SURPLUS_BYTES, shares_vocabulary, weights_of
from sgdiag.model.shape import ModelShape, Parallel, Weight

GIVEN: dict[str, Any] = {
    "architecture": "M",
    "attention": "mha",
    "hidden_layers": 4,
    "kv_layer_ids": (0, 1, 2, 3),
    "attention_heads": 8,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "context_len_tokens": 100,
    "itemsize_bytes": 2,
}


def held(
    name: str, *, tp: int = 4, pp: int = 1, dp: int = 1, dims: int = 2, dtype: str = "BF16", **shape: Any
) -> list[tuple[float, float]]:
    """Bytes of a tensor of 1,200 elements, 2,400 bytes in the file, by stage: at least and at most."""
    weight = Weight(name, dtype, 1200, 2400, dims)
    parallel = Parallel(tp=tp, pp=pp, dp=dp, dp_attention=dp > 1)
    stages = weights_of([weight], ModelShape(**{**GIVEN, **shape}), parallel)
    return [(one.target_bytes.low, one.target_bytes.high - LOADING_SURPLUS_BYTES.high) for one in stages]


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("name", "changes", "share"),
    [
        (f"{LAYER}mlp.up_proj.weight", {}, (600, 600)),
        (f"{LAYER}self_attn.q_proj.weight", {}, (600, 600)),
        # Two heads of keys on four ranks: each has one of the two.
        (f"{LAYER}self_attn.k_proj.weight", {}, (1200, 1200)),
        (f"{LAYER}self_attn.v_proj.weight", {"tp": 2}, (1200, 1200)),
        (f"{LAYER}self_attn.v_proj.weight", {"tp": 1}, (2400, 2400)),
        (f"{LAYER}self_attn.o_proj.weight", {"tp": 2}, (1200, 1200)),
        # Two of eight heads of queries, and one each of keys and values, of twelve.
        (f"{LAYER}self_attn.qkv_proj.weight", {}, (800, 800)),
        (f"{LAYER}attention.query_key_value.weight", {}, (800, 800)),
        ("transformer.h.1.attn.c_attn.weight", {}, (800, 800)),
        (f"{LAYER}attn.qkv.weight", {}, (800, 800)),
        # With attention DP over two groups of two ranks attention is split in two.
        (f"{LAYER}self_attn.q_proj.weight", {"dp": 2}, (1200, 1200)),
        (f"{LAYER}mlp.up_proj.weight", {"dp": 2}, (600, 600)),
        # Whole on every rank.
        (f"{LAYER}mlp.gate.weight", {}, (2400, 2400)),
        (f"{LAYER}mlp.router.weight", {}, (2400, 2400)),
        (f"{LAYER}mlp.shared_expert_gate.weight", {}, (2400, 2400)),
        (f"{LAYER}self_attn.q_a_proj.weight", {}, (2400, 2400)),
        (f"{LAYER}self_attn.kv_a_proj_with_mqa.weight", {}, (2400, 2400)),
        (f"{LAYER}self_attn.indexer.wq.weight", {}, (2400, 2400)),
        (f"{LAYER}mlp.gate_proj.weight", {}, (600, 600)),
        (f"{LAYER}input_layernorm.weight", {"dims": 1}, (2400, 2400)),
        (f"{LAYER}self_attn.q_proj.bias", {"dims": 1}, (600, 2400)),
        (f"{LAYER}mlp.experts.7.up_proj.weight", {}, (600, 600)),
        ("model.embed_tokens.weight", {}, (600, 600)),
        ("transformer.wte.weight", {}, (600, 600)),
        ("lm_head.weight", {}, (600, 600)),
        ("model.embed_tokens.weight", {"dp": 2}, (600, 2400)),
        # What stands outside of the layers may be whole or split.
        ("model.projector.weight", {}, (600, 2400)),
        ("model.blocks.1.odd.weight", {}, (600, 600)),
        ("visual.blocks.1.attn.qkv.weight", {}, (600, 2400)),
        ("model.vision_tower.layers.1.mlp.weight", {}, (600, 2400)),
        ("audio_tower.layers.1.mlp.weight", {}, (600, 2400)),
        ("multi_modal_projector.weight", {}, (600, 2400)),
        ("model.mm_projector.weight", {}, (600, 2400)),
        ("model.image_newline.weight", {}, (600, 2400)),
        # Latent attention keeps the two halves of one projection once more.
        (f"{LAYER}self_attn.kv_b_proj.weight", {"attention": "mla"}, (600, 1200)),
        (f"{LAYER}self_attn.kv_b_proj.weight_scale", {"attention": "mla"}, (600, 600)),
        (f"{LAYER}self_attn.k_proj.weight", {"attention": "mla"}, (600, 600)),
    ],
)
def test_what_a_rank_holds_of_a_tensor(name: str, changes: dict[str, Any], share: tuple[float, float]) -> None:
    assert held(name, **changes) == [pytest.approx(share)]


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("w.weight", "F32", 4800),
        ("w.weight", "F64", 4800),
        ("w.weight", "F16", 4800),
        ("w.weight", "F8_E4M3", 2400),
        ("w.weight", "I32", 2400),
        ("w.weight_scale", "F32", 2400),
        ("w.e_score_correction_bias", "F32", 2400),
        ("w.A_log", "F32", 2400),
        ("w.dt_bias", "F32", 2400),
        ("w.qzeros", "F16", 2400),
    ],
)
def test_floats_are_loaded_in_the_models_own_type(name: str, dtype: str, size: float) -> None:
    assert held(LAYER + name, tp=1, dtype=dtype, itemsize_bytes=4) == [(size, size)]


@pytest.mark.parametrize(
    ("name", "changes", "stages"),
    [
        ("model.layers.0.mlp.weight", {}, [True, False]),
        ("model.layers.2.mlp.weight", {}, [False, True]),
        ("model.embed_tokens.weight", {}, [True, False]),
        ("lm_head.weight", {}, [False, True]),
        ("model.lm_head.weight", {}, [False, True]),
        ("model.embed_tokens.weight", {"tied_embeddings": True}, [True, True]),
        ("lm_head.weight", {"tied_embeddings": True}, [False, True]),
        ("visual.blocks.3.weight", {}, [True, False]),
        ("model.norm.weight", {}, [False, True]),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}, [False, False]),
        ("mtp.layers.0.weight", {}, [False, False]),
        ("model.layers.4.mlp.weight", {}, [False, False]),
    ],
)
def test_the_stage_that_holds_a_tensor(name: str, changes: dict[str, Any], stages: list[bool]) -> None:
    assert [low > 0 for low, _ in held(name, tp=1, pp=2, **changes)] == stages


def test_a_tied_head_is_one_tensor_on_one_stage() -> None:
    assert held("lm_head.weight", tp=1, tied_embeddings=True) == [(0, 0)]


def test_layers_for_prediction_are_a_draft_of_the_last_stage() -> None:
    shape = ModelShape(**GIVEN)
    weights = [
        Weight("model.layers.4.mlp.weight", "BF16", 100, 200, 2),
        Weight("mtp.layers.0.mlp.weight", "BF16", 100, 200, 2),
        Weight("model.layers.4.embed_tokens.weight", "BF16", 100, 200, 2),
        Weight("model.layers.4.shared_head.head.weight", "BF16", 100, 200, 2),
    ]
    one, two = weights_of(weights, shape, Parallel(pp=2))
    assert (one.draft_bytes.low, one.draft_bytes.high) == (0, 0)
    # What the draft shares with its target may be freed again.
    assert (two.draft_bytes.low, two.draft_bytes.high) == (400, 800)
    assert [shares_vocabulary(weight) for weight in weights] == [False, False, True, True]
