"""Cells and states against SGLang's formulas, worked out by hand for shapes of well-known kinds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.analysis.kv.cell_size import misfit, stages, state_bytes
from sgdiag.model import Known, SgdiagError, Unknown
from sgdiag.model.shape import Parallel
from sgdiag.releases.models.configs import shape_of
from sgdiag.releases.models.reader import MAX_LAYERS
from sgdiag.releases.models.sizing import defaults_of
from sgdiag.sources.model_plan import cell_size_of
from tests.unit.made_models import DELTA_NET, DENSE, LATENT, SPARSE, WINDOWS


def cell(config: object, release: str = "0.5.23", **args: Any) -> int:
    found = cell_size_of(config, args, release)
    assert isinstance(found, Known), found
    return found.value


def reason(config: object, release: str = "0.5.23", **args: Any) -> str:
    found = cell_size_of(config, args, release)
    assert isinstance(found, Unknown), found
    assert "\n" not in found.reason
    return found.reason


def test_keys_and_values_of_a_ranks_heads() -> None:
    assert cell(DENSE) == 8 * (128 + 128) * 32 * 2
    assert cell(DENSE, tp_size=4) == 2 * (128 + 128) * 32 * 2
    assert cell(DENSE, tp_size=16) == 1 * (128 + 128) * 32 * 2, "two ranks keep the same head"
    assert cell(DENSE, kv_cache_dtype="fp8_e5m2") == 8 * (128 + 128) * 32
    assert cell({**DENSE, "v_head_dim": 64}) == 8 * (128 + 64) * 32 * 2


def test_attention_dp_splits_heads_over_the_ranks_of_its_group_only() -> None:
    assert cell(DENSE, tp_size=8, dp_size=4, enable_dp_attention=True) == cell(DENSE, tp_size=2)
    assert cell(DENSE, tp_size=8, dp_size=4) == cell(DENSE, tp_size=8)


def test_eight_bits_with_a_scale_for_32_elements_and_four_with_one_for_16() -> None:
    elements = 8 * (128 + 128) * 32
    assert cell(DENSE, kv_cache_dtype="mxfp8") == elements + elements // 32
    assert cell(DENSE, "0.5.9", kv_cache_dtype="fp4_e2m1") == elements // 2 + elements // 16
    assert "attention backend" in reason(DENSE, "0.5.16", kv_cache_dtype="nvfp4")


def test_a_checkpoint_may_ask_for_an_eight_bit_cache() -> None:
    for quantization in (
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "fp8"}},
    ):
        config = {**DENSE, "quantization_config": quantization}
        assert cell(config) == cell(DENSE, kv_cache_dtype="fp8_e4m3")
        assert cell(config, kv_cache_dtype="bfloat16") == cell(DENSE)
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
    assert cell({**DENSE, "quantization_config": scheme}) == cell(DENSE), "auto follows ModelOpt only"


def test_latent_attention_is_whole_on_every_rank() -> None:
    assert cell(LATENT, "0.5.9") == cell(LATENT, "0.5.9", tp_size=8) == (512 + 64) * 61 * 2


def test_draft_layers_count_from_0_5_14_on() -> None:
    per_layer = (512 + 64) * 2
    for algorithm in ("EAGLE", "NEXTN"):
        assert cell(LATENT, "0.5.13.post1", speculative_algorithm=algorithm) == per_layer * 61
        assert cell(LATENT, "0.5.14", speculative_algorithm=algorithm) == per_layer * 62
    assert cell(LATENT, speculative_algorithm="NGRAM") == per_layer * 61
    assert "DFLASH" in reason(LATENT, speculative_algorithm="DFLASH")


def test_an_unknown_release_is_taken_for_the_newest() -> None:
    for config in (WINDOWS, LATENT):
        assert cell(config, "", speculative_algorithm="EAGLE") == cell(config, speculative_algorithm="EAGLE")


def test_the_index_of_sparse_attention() -> None:
    index = 128 + 128 // 128 * 4
    assert cell(SPARSE, "0.5.9", kv_cache_dtype="bfloat16") == ((512 + 64) * 2 + index) * 61
    assert cell(SPARSE, "0.5.9", kv_cache_dtype="fp8_e4m3") == (512 + 64 + index) * 61
    scaled = 512 + 512 // 128 * 4 + 64 * 2
    assert cell(SPARSE, "0.5.17", kv_cache_dtype="fp8_e4m3") == (scaled + index) * 61
    assert cell(SPARSE, kv_cache_dtype="fp8_e4m3", dsa_decode_backend="trtllm") == (512 + 64 + index) * 61
    skipping = {**SPARSE, "index_topk_pattern": "FS" * 30 + "F"}
    assert cell(skipping, "0.5.17", kv_cache_dtype="bfloat16") == ((512 + 64) * 2 + index) * 61
    assert cell(skipping, "0.5.18", kv_cache_dtype="bfloat16") == (512 + 64) * 2 * 61 + index * 31
    assert "GPU" in reason(SPARSE)


def test_sliding_windows_cost_their_share() -> None:
    layer = 8 * (64 + 64) * 2
    assert cell(WINDOWS) == round(12 * layer + 0.8 * 12 * layer)
    assert cell(WINDOWS, swa_full_tokens_ratio=0.5) == 12 * layer + 6 * layer
    everything = {**WINDOWS, "architectures": ["UnlimitedOCRForCausalLM"]}
    assert cell(everything) == 24 * layer, "without full layers there is no share"
    assert cell(everything, "0.5.14") == 24 * layer, "an older release keeps every token"


def test_gemma_4_names_the_wide_heads_of_its_full_layers_apart() -> None:
    text: dict[str, Any] = {
        "model_type": "gemma4_text",
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    full, window = 2 * (512 + 512) * 2, 4 * (256 + 256) * 2
    assert cell(config, "0.5.21", swa_full_tokens_ratio=0.5) == full + round(0.5 * 5 * window)
    assert cell(config, "0.5.22", swa_full_tokens_ratio=0.5) == 2 * full + round(0.5 * 5 * window)
    text["attention_k_eq_v"] = True
    assert cell(config, "0.5.22", swa_full_tokens_ratio=0.5) == full + round(0.5 * 5 * window)


def test_only_layers_that_attend_keep_tokens() -> None:
    assert cell(DELTA_NET) == 2 * (256 + 256) * 12 * 2


def test_the_state_of_a_delta_net() -> None:
    shape = shape_of(DELTA_NET, "0.5.23")
    assert shape.state is not None
    window = (128 * 32 + 2 * 16 * 128) * 3
    matrix = 32 * 128 * 128
    assert state_bytes(shape.state, 1) == (window * 2 + matrix * 4) * 36
    assert state_bytes(shape.state, 2) == (window // 2 * 2 + matrix // 2 * 4) * 36
    assert state_bytes(shape.state, 1, range(24)) == state_bytes(shape.state, 1) // 2
    halved = shape_of({**DELTA_NET, "mamba_ssm_dtype": "bfloat16"}, "0.5.23")
    assert halved.state is not None and state_bytes(halved.state, 1) == (window * 2 + matrix * 2) * 36


def test_short_convolutions_keep_a_window_only() -> None:
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 1536,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
    }
    shape = shape_of(config, "0.5.9")
    assert cell(config, "0.5.9") == 8 * (64 + 64) * 2
    assert shape.state is not None and state_bytes(shape.state, 1) == 1536 * 2 * 2 * 3


@pytest.mark.parametrize(
    ("config", "attention", "state"),
    [
        (
            {
                "architectures": ["NemotronHForCausalLM"],
                "hybrid_override_pattern": "M-M*-M",
                "mamba_num_heads": 16,
                "mamba_head_dim": 64,
                "n_groups": 4,
                "ssm_state_size": 128,
                "conv_kernel": 4,
            },
            (3,),
            ((16 * 64 + 2 * 4 * 128) * 3 * 2 + 16 * 64 * 128 * 4) * 3,
        ),
        (
            {
                "architectures": ["KimiLinearForCausalLM"],
                "num_hidden_layers": 4,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 3],
                    "num_heads": 8,
                    "head_dim": 128,
                    "short_conv_kernel_size": 4,
                },
            },
            (3,),
            (3 * 8 * 128 * 3 * 2 + 8 * 128 * 128 * 4) * 3,
        ),
        (
            {
                "architectures": ["FalconH1ForCausalLM"],
                "model_type": "falcon_h1",
                "num_hidden_layers": 2,
                "mamba_d_ssm": 1024,
                "mamba_n_heads": 16,
                "mamba_n_groups": 1,
                "mamba_d_state": 128,
                "mamba_d_conv": 4,
            },
            (0, 1),
            ((1024 + 2 * 128) * 3 * 2 + 16 * 64 * 128 * 4) * 2,
        ),
        (
            {
                "architectures": ["BailingMoeV2_5ForCausalLM"],
                "model_type": "bailing_hybrid",
                "num_hidden_layers": 8,
                "layer_group_size": 4,
                "head_dim": 128,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            (3, 7),
            32 * 128 * 128 * 4 * 6,
        ),
    ],
)
def test_other_recurrent_models(config: dict[str, Any], attention: tuple[int, ...], state: int) -> None:
    shape = shape_of({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, **config}, "0.5.23")
    assert shape.kv_layer_ids == attention
    assert shape.state is not None
    assert state_bytes(shape.state, 1) == state


def test_pipeline_stages_give_the_last_ones_more() -> None:
    assert [len(stage) for stage in stages(61, 4)] == [15, 15, 15, 16]
    assert [layer for stage in stages(61, 4) for layer in stage] == list(range(61))
    assert cell(LATENT, "0.5.9", pp_size=4) == (512 + 64) * 16 * 2, "the fullest stage decides"


def test_the_text_model_of_a_multimodal_one_and_what_transformers_fills_in() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    assert cell(config) == 4 * (256 + 256) * 34 * 2
    shape = shape_of(config, "0.5.23")
    assert shape.context_len_tokens == 131072
    assert not shape.multimodal, "served as text unless asked"


def test_context_follows_the_rope_scaling_that_sglang_applies() -> None:
    def context(**scaling: Any) -> int:
        return shape_of({**DENSE, "rope_scaling": scaling}, "0.5.23").context_len_tokens

    assert context(type="linear", factor=4.0) == 32768
    assert context(rope_type="llama3", factor=8.0) == 8192
    assert context(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192) == 8192


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [
        ([], {}, "not a JSON object"),
        ({}, {}, "names no architecture"),
        ({"architectures": [7]}, {}, "names no architecture"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, {}, "compresses"),
        ({**DENSE, "num_hidden_layers": None}, {}, "does not give num_hidden_layers"),
        ({**DENSE, "num_hidden_layers": 10**12}, {}, "num_hidden_layers"),
        ({**DENSE, "num_attention_heads": 0}, {}, "num_attention_heads is 0"),
        ({**DENSE, "hidden_size": "big"}, {}, "hidden_size"),
        (DENSE, {"tp_size": 5}, "32 attention heads do not divide over 5"),
        ({**DENSE, "num_key_value_heads": 6}, {"tp_size": 4}, "6 KV heads neither divide"),
        (DENSE, {"pp_size": 33}, "fewer than pp 33"),
        (DENSE, {"kv_cache_dtype": "int3"}, "int3"),
        (DENSE, {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_cannot_be_told_is_one_line(config: object, args: dict[str, Any], words: str) -> None:
    assert words in reason(config, **args)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**15) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    base=st.sampled_from([DENSE, LATENT, SPARSE, WINDOWS, DELTA_NET]),
    key=st.sampled_from(sorted({*DENSE, *SPARSE, *WINDOWS, *DELTA_NET, "text_config", "rope_scaling", "attn_config"})),
    value=_JSON,
    tp=st.integers(1, 9),
)
def test_a_nonsense_configuration_never_breaks_anything(base: dict[str, Any], key: str, value: Any, tp: int) -> None:
    found = cell_size_of({**base, key: value}, {"tp_size": tp, "kv_cache_dtype": "bfloat16"}, "0.5.23")
    assert isinstance(found, Unknown) or found.value >= 0
    try:
        shape = shape_of({**base, key: value}, "0.5.9")
    except SgdiagError:
        return
    assert shape.hidden_layers <= MAX_LAYERS
    assert misfit(shape, Parallel(tp=tp)) or shape.attention_heads % tp == 0


def test_the_default_fraction_for_an_80_gb_gpu() -> None:
    shape = shape_of(DENSE, "0.5.12")
    memory = 81559 * 2**20

    def fraction(release: str, tp: int = 2, algorithm: str = "") -> tuple[float, float]:
        found = defaults_of(release, memory, shape, Parallel(tp=tp), speculative_algorithm=algorithm)
        return found.fraction_low, found.fraction_high

    reserve = 512 + 8192 * 1.5 + 256 * 2 + 2 / 8 * 1024
    assert fraction("0.5.9") == (round((81559 - reserve) / 81559, 3),) * 2
    # 0.828 is what a public report names for such a GPU.
    assert fraction("0.5.12") == (0.828, 0.834)
    assert fraction("0.5.12", algorithm="EAGLE3")[0] == round(1 - (reserve + 58 * 8 + 4096) / 81559, 3)
    assert fraction("0.5.14", algorithm="EAGLE3") == fraction("0.5.14")
    assert fraction("0.5.12", tp=8)[0] < fraction("0.5.12", tp=2)[0]


def test_an_image_tower_takes_its_share_of_the_fraction() -> None:
    memory = 81559 * 2**20
    plain = shape_of(DENSE, "0.5.23")
    tower = {"num_hidden_layers": 24, "hidden_size": 1024}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": DENSE, "vision_config": tower}
    seen = shape_of(config, "0.5.23")
    ratio = (
        defaults_of("0.5.23", memory, seen, Parallel()).fraction_low
        / defaults_of("0.5.23", memory, plain, Parallel()).fraction_low
    )
    assert ratio == pytest.approx(0.95)
