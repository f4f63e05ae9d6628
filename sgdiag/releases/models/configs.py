"""What SGLang reads from a model's ``config.json``: attention kind, heads, layers, state and context, by release.

SGLang decides by the first entry of ``architectures``; the tables name the release from which it does so. Releases
older than 0.5.9 are taken to do as that one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgdiag.model.shape import ModelShape, WindowShape
from sgdiag.releases import versions
from sgdiag.releases.models.reader import MAX_LAYERS, ConfigError, ConfigReader
from sgdiag.releases.models.states import attention_and_state

_OLDEST = "0.5.9"

LATENT_ATTENTION = frozenset(
    {
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLMNextN",
        "DeepseekVL2ForCausalLM",
        "DotsVLMForCausalLM",
        "Eagle3DeepseekV2ForCausalLM",
        "GigaChat35ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteForCausalLMNextN",
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaForCausalLMNextN",
        "HYV4ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiK3LinearForCausalLM",
        "KimiLinearForCausalLM",
        "KimiVLForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MistralLarge3ForCausalLM",
        "MistralLarge3ForCausalLMEagle",
        "PixtralForConditionalGeneration",
        "SarvamMLAForCausalLM",
    }
)
"""Architectures with multi-head latent attention, where the configuration gives ``kv_lora_rank``."""

SPARSE_INDEX = {
    "DeepseekV32ForCausalLM": _OLDEST,
    "DeepseekV3ForCausalLM": _OLDEST,
    "DeepseekV3ForCausalLMNextN": _OLDEST,
    "GlmMoeDsaForCausalLM": _OLDEST,
    "HYV4ForCausalLM": "0.5.20",
    "GlmMoeDsaForCausalLMNextN": "0.5.16",
    "LongcatFlashForCausalLM": "0.5.16",
    "MistralLarge3ForCausalLM": _OLDEST,
    "PixtralForConditionalGeneration": _OLDEST,
}
"""Architectures that keep an index beside the latent cache when the configuration gives ``index_topk``."""

INDEX_SKIPPING_SINCE = "0.5.18"
"""From here on layers that reuse the previous layer's choice of tokens keep no index."""

SLIDING_WINDOW = {
    "BeamForCausalLM": "0.5.23",
    "EmbeddingGemma2Model": "0.5.22",
    "Gemma4ForCausalLM": "0.5.11",
    "Gemma4ForConditionalGeneration": "0.5.11",
    "Gemma4UnifiedForConditionalGeneration": "0.5.13",
    "GptOssForCausalLM": _OLDEST,
    "LagunaForCausalLM": "0.5.12",
    "Llama4ForConditionalGeneration": _OLDEST,
    "MellumForCausalLM": "0.5.16",
    "MiMoV2FlashForCausalLM": _OLDEST,
    "MiMoV2ForCausalLM": "0.5.11",
    "MuseGlimmerForCausalLM": "0.5.18",
    "MuseGlimmerForConditionalGeneration": "0.5.18",
    "Step3p5ForCausalLM": _OLDEST,
    "Step3p7ForConditionalGeneration": "0.5.13",
    "UnlimitedOCRForCausalLM": "0.5.15",
}
"""Architectures whose sliding-window layers get a pool of their own; others keep every token in every layer."""

WINDOW_BY_CONFIG_SINCE = "0.5.13"
"""From here on a configuration may ask for that pool itself (``is_hybrid_swa`` and ``hybrid_layer_pattern``)."""

SHARED_KEYS_ONLY_SINCE = "0.5.22"
"""From here on Gemma 4's ``num_global_key_value_heads`` counts only where keys are values (``attention_k_eq_v``)."""

NOT_COMPUTED = {
    "DeepseekV4ForCausalLM": "compresses its cache by layer",
    "DeepseekV4ForCausalLMDSpark": "compresses its cache by layer",
    "Dots3NoteForCausalLM": "mixes latent attention of two widths",
    "Glm5NextForConditionalGeneration": "mixes latent and linear attention",
    "InklingForConditionalGeneration": "mixes sliding windows and recurrent state",
    "MiniMaxM3SparseForCausalLM": "keeps dense and sparse layers apart",
    "MiniMaxM3SparseForConditionalGeneration": "keeps dense and sparse layers apart",
    "MuseSparkForConditionalGeneration": "mixes several caches",
}
"""Architectures whose pools SGLang sizes by formulas of their own that sgdiag does not follow."""

_IMAGES_OFF = frozenset(
    {"Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration", "Step3VLForConditionalGeneration"}
)
"""Served as text models unless ``--enable-multimodal`` is given."""

_TEXT_CONFIGS = ("thinker_config", "llm_config", "language_config", "text_config")
_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_KV_HEAD_KEYS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
DEFAULT_CONTEXT_TOKENS = 2048
ITEMSIZE_BYTES = 2
"""Served with ``--dtype auto``, float32 checkpoints too become 16 bits wide."""


def shape_of(config: object, release: str, *, draft: bool = False) -> ModelShape:
    """The shape of the model that ``config`` (the parsed ``config.json``) describes, as ``release`` sees it.

    ``draft``: read as SGLang reads a draft model's. Raises ConfigError.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("config.json is not a JSON object")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ConfigError("config.json names no architecture", "SGLang decides by the first entry of architectures")
    architecture = architectures[0]
    if architecture in NOT_COMPUTED and not draft:
        raise ConfigError(f"{architecture} {NOT_COMPUTED[architecture]}: sgdiag does not compute its cache size")
    top = ConfigReader(config)
    text = _text_config(top)
    layers = _hidden_layers(text)
    heads = text.number("num_attention_heads", MAX_LAYERS)
    latent = architecture in LATENT_ATTENTION and text.get("kv_lora_rank") is not None
    head_dim = text.find("head_dim") or (text.number("hidden_size") // heads)
    kv_heads = _kv_heads(top, text, heads)
    window = None if latent else _window(architecture, text, layers, kv_heads, head_dim, release)
    if window is not None and architecture.startswith("Gemma4"):
        head_dim = text.find("global_head_dim") or head_dim
        if text.get("attention_k_eq_v") or not versions.at_least(release, SHARED_KEYS_ONLY_SINCE):
            kv_heads = text.find("num_global_key_value_heads") or kv_heads
    windowed = set(window.layer_ids) if window is not None else set()
    attention_ids, state = attention_and_state(top, text, layers)
    kv_ids = tuple(i for i in attention_ids if i not in windowed)
    indexed = latent and text.get("index_topk") is not None and _known_by(SPARSE_INDEX, architecture, release)
    return ModelShape(
        architecture=architecture,
        attention="mla" if latent else "mha",
        hidden_layers=layers,
        kv_layer_ids=kv_ids,
        kv_per_layer=_kv_per_layer(architecture, text),
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if architecture.startswith("Gemma4") else text.find("v_head_dim") or head_dim,
        latent_dim=text.number("kv_lora_rank") if latent else 0,
        rope_dim=(0 if text.get("use_mla_nope") else text.number("qk_rope_head_dim")) if latent else 0,
        index_dim=text.number("index_head_dim") if indexed else 0,
        index_layer_ids=_index_layers(text, kv_ids, release) if indexed else (),
        window=window,
        state=state,
        context_len_tokens=_context(text),
        itemsize_bytes=ITEMSIZE_BYTES,
        kv_cache_algorithm=_kv_cache_algorithm(config),
        nextn_layers=_nextn_layers(architecture, text, draft=draft),
        tied_embeddings=bool(top.get("tie_word_embeddings")),
        multimodal=text is not top and architecture not in _IMAGES_OFF,
        vision=_vision(top),
    )


def _known_by(table: Mapping[str, str], architecture: str, release: str) -> bool:
    since = table.get(architecture)
    return since is not None and (since == _OLDEST or versions.at_least(release, since))


def _text_config(top: ConfigReader) -> ConfigReader:
    for key in _TEXT_CONFIGS:
        section = top.section(key)
        if section is not None:
            inner = section.section("text_config") if key == "thinker_config" else None
            return inner or section
    return top


def _hidden_layers(text: ConfigReader) -> int:
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return min(len(pattern), MAX_LAYERS)
    return text.number("num_hidden_layers", MAX_LAYERS)


def _kv_heads(top: ConfigReader, text: ConfigReader, heads: int) -> int:
    if text.get("multi_query") and not top.get("new_decoder_architecture"):
        return 1
    attention = top.section("attn_config")
    if attention is not None and attention.find("kv_n_heads"):
        return attention.number("kv_n_heads")
    for key in _KV_HEAD_KEYS:
        found = text.find(key, MAX_LAYERS)
        if found:
            return found
    return heads


def _kv_per_layer(architecture: str, text: ConfigReader) -> int:
    if architecture.startswith("LongcatFlash"):
        return 2
    return text.find("loop_num", MAX_LAYERS) or text.find("num_loops", MAX_LAYERS) or 1


def _window(
    architecture: str, text: ConfigReader, layers: int, kv_heads: int, head_dim: int, release: str
) -> WindowShape | None:
    asked = bool(text.get("is_hybrid_swa")) and versions.at_least(release, WINDOW_BY_CONFIG_SINCE)
    if not asked and not _known_by(SLIDING_WINDOW, architecture, release):
        return None
    ids = _window_layers(architecture, text, layers)
    if not ids:
        return None
    other = text.section("attention_other_setting")
    window_heads = text.find("swa_num_key_value_heads", MAX_LAYERS) or (
        other.find("num_attention_groups", MAX_LAYERS) if other is not None else None
    )
    window_dim = text.find("swa_head_dim") or head_dim
    return WindowShape(
        layer_ids=ids,
        kv_heads=window_heads or kv_heads,
        head_dim=window_dim,
        v_head_dim=text.find("swa_v_head_dim") or window_dim,
    )


def _window_layers(architecture: str, text: ConfigReader, layers: int) -> tuple[int, ...]:
    if architecture == "Llama4ForConditionalGeneration":
        return tuple(i for i in range(layers) if (i + 1) % 4)
    if architecture == "UnlimitedOCRForCausalLM":
        return tuple(range(layers))
    if architecture == "LagunaForCausalLM" and not text.get("sliding_window"):
        return ()
    key = "hybrid_layer_pattern" if text.get("hybrid_layer_pattern") is not None else "layer_types"
    return tuple(i for i, kind in enumerate(text.strings(key)[:layers]) if kind in ("sliding_attention", "1"))


def _index_layers(text: ConfigReader, ids: Sequence[int], release: str) -> tuple[int, ...]:
    if not versions.at_least(release, INDEX_SKIPPING_SINCE):
        return tuple(ids)
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, (str, list)):
        return tuple(i for i in ids if i >= len(pattern) or pattern[i] != "S")
    every = text.find("index_topk_freq") or 1
    first = text.find("index_skip_topk_offset") or 2
    return tuple(i for i in ids if max(i - first + 1, 0) % every == 0)


def _context(text: ConfigReader) -> int:
    scaling = text.section("rope_scaling")
    factor: Any = 1
    if (
        scaling is not None
        and scaling.get("original_max_position_embeddings") is None
        and scaling.get("rope_type") != "llama3"
    ):
        factor = scaling.get("factor")
    factor = factor if isinstance(factor, (int, float)) and 0 < factor <= MAX_LAYERS else 1
    for key in _CONTEXT_KEYS:
        found = text.find(key)
        if found is not None:
            return int(factor * found)
    return DEFAULT_CONTEXT_TOKENS


def _kv_cache_algorithm(config: Mapping[str, Any]) -> str:
    """``FP8`` where a ModelOpt checkpoint quantises the KV cache too, which ``--kv-cache-dtype auto`` follows."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return ""
    inner = quantization.get("quantization")
    for place in (quantization, inner if isinstance(inner, Mapping) else {}):
        name = place.get("kv_cache_quant_algo")
        if isinstance(name, str):
            return name.upper()
    scheme = quantization.get("kv_cache_scheme")
    eight_bits = isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return "FP8" if eight_bits and str(quantization.get("quant_method")).startswith("modelopt") else ""


_ONE_DRAFT_LAYER = (
    "Qwen3NextForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "ExaoneMoEForCausalLM",
    "NemotronHForCausalLM",
    "HYV3ForCausalLM",
)
"""Read as a draft these have one layer, whatever the configuration says."""


def _nextn_layers(architecture: str, text: ConfigReader, *, draft: bool) -> int | None:
    if draft and architecture in _ONE_DRAFT_LAYER:
        return 1
    return text.find("num_nextn_predict_layers", MAX_LAYERS)


def _vision(top: ConfigReader) -> tuple[int, int] | None:
    vision = top.section("vision_config")
    if vision is None:
        return None
    return vision.find("num_hidden_layers", MAX_LAYERS) or 24, vision.find("hidden_size") or 1024
