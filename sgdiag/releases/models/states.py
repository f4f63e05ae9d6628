"""Which layers of a model attend, and the recurrent state that the others keep, as SGLang reads it."""

from __future__ import annotations

from sgdiag.model.shape import StateShape
from sgdiag.releases.models.reader import MAX_LAYERS, ConfigReader

_STATE_ITEMSIZE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def attention_and_state(
    top: ConfigReader, text: ConfigReader, layers: int
) -> tuple[tuple[int, ...], StateShape | None]:
    """The layers with attention, and the recurrent state of the others."""
    every = tuple(range(layers))
    for read in (_delta_net, _kda, _nemotron_h, _falcon_h1, _granite, _short_convolution, _lightning, _jet):
        found = read(top, text, every)
        if found is not None:
            return found
    return every, None


_Found = tuple[tuple[int, ...], StateShape] | None


def _temporal_bytes(top: ConfigReader, text: ConfigReader) -> int:
    return _STATE_ITEMSIZE_BYTES.get(str(text.get("mamba_ssm_dtype") or top.get("mamba_ssm_dtype")), 4)


def _delta_net(top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """Qwen3-Next and Qwen3.5: every n-th layer attends, the others are gated delta nets."""
    if not str(text.get("model_type")).startswith(("qwen3_next", "qwen3_5")):
        return None
    interval = text.number("full_attention_interval", MAX_LAYERS)
    values, keys = text.number("linear_num_value_heads"), text.number("linear_num_key_heads")
    dim = text.number("linear_value_head_dim")
    state = StateShape(
        layer_ids=tuple(i for i in every if (i + 1) % interval),
        intermediate=dim * values,
        groups=keys,
        heads=values,
        head_dim=dim,
        state=text.number("linear_key_head_dim"),
        kernel=text.number("linear_conv_kernel_dim"),
        temporal_itemsize_bytes=_temporal_bytes(top, text),
    )
    return tuple(i for i in every if (i + 1) % interval == 0), state


def _kda(_top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """Kimi Linear: the layers of ``kda_layers``, counted from 1, are linear."""
    linear = text.section("linear_attn_config")
    if linear is None or linear.get("kda_layers") is None:
        return None
    named = set(linear.strings("kda_layers"))
    heads, dim = linear.number("num_heads"), linear.number("head_dim")
    state = StateShape(
        layer_ids=tuple(i for i in every if str(i + 1) in named),
        intermediate=heads * dim,
        groups=heads,
        heads=heads,
        head_dim=dim,
        state=dim,
        kernel=linear.number("short_conv_kernel_size"),
    )
    return tuple(i for i in every if str(i + 1) not in named), state


def _nemotron_h(top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """Nemotron-H: a pattern with M for Mamba2 and * for attention."""
    pattern = text.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        return None
    heads, dim = text.number("mamba_num_heads"), text.number("mamba_head_dim")
    state = StateShape(
        layer_ids=tuple(i for i in every if pattern[i] == "M"),
        intermediate=heads * dim,
        groups=text.find("n_groups") or text.number("mamba_n_groups"),
        heads=heads,
        head_dim=dim,
        state=text.number("ssm_state_size"),
        kernel=text.find("conv_kernel") or text.number("mamba_d_conv"),
        temporal_itemsize_bytes=_temporal_bytes(top, text),
    )
    return tuple(i for i in every if pattern[i] == "*"), state


def _mamba2(top: ConfigReader, text: ConfigReader, ids: tuple[int, ...], intermediate: int) -> StateShape:
    heads = text.number("mamba_n_heads")
    dim = text.get("mamba_d_head")
    return StateShape(
        layer_ids=ids,
        intermediate=intermediate,
        groups=text.number("mamba_n_groups"),
        heads=heads,
        head_dim=intermediate // heads if dim in (None, "auto") else text.number("mamba_d_head"),
        state=text.number("mamba_d_state"),
        kernel=text.number("mamba_d_conv"),
        temporal_itemsize_bytes=_temporal_bytes(top, text),
    )


def _falcon_h1(top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """Falcon-H1: every layer has both attention and Mamba2."""
    if text.get("model_type") != "falcon_h1":
        return None
    inner = text.find("mamba_d_ssm") or text.number("mamba_expand") * text.number("hidden_size")
    return every, _mamba2(top, text, every, inner)


def _granite(top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """Granite 4: ``layer_types`` with mamba and attention."""
    if text.get("model_type") != "granitemoehybrid":
        return None
    kinds = text.strings("layer_types")
    if "mamba" not in kinds:
        return None
    inner = text.number("mamba_expand") * text.number("hidden_size")
    ids = tuple(i for i in every if i < len(kinds) and kinds[i] == "mamba")
    # SGLang passes no configuration here, so the state is always float32.
    state = _mamba2(top, text.changed(mamba_ssm_dtype="float32"), ids, inner)
    return tuple(i for i in every if i < len(kinds) and kinds[i] == "attention"), state


def _short_convolution(_top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """LFM2: short convolutions with a window and no matrix."""
    if not str(text.get("model_type")).startswith("lfm2"):
        return None
    kinds = text.strings("layer_types")
    state = StateShape(
        layer_ids=tuple(i for i in every if i < len(kinds) and kinds[i] in ("conv", "short_conv")),
        intermediate=text.number("hidden_size"),
        groups=1,
        heads=0,
        head_dim=0,
        state=0,
        kernel=text.number("conv_L_cache"),
    )
    return tuple(i for i in every if i < len(kinds) and kinds[i] == "full_attention"), state


def _lightning(_top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """Bailing (Ling 2.5): the last layer of each group attends, the others are lightning attention."""
    group = text.get("layer_group_size")
    if text.get("model_type") != "bailing_hybrid" or text.get("use_kda") or not isinstance(group, int) or group < 1:
        return None
    heads = text.number("num_attention_heads")
    dim = text.number("head_dim")
    state = StateShape(
        layer_ids=tuple(i for i in every if (i + 1) % group),
        intermediate=0,
        groups=0,
        heads=heads,
        head_dim=dim,
        state=dim,
        kernel=1,
    )
    return tuple(i for i in every if (i + 1) % group == 0), state


def _jet(top: ConfigReader, text: ConfigReader, every: tuple[int, ...]) -> _Found:
    """Jet-Nemotron: ``layer_types`` with jet blocks and attention."""
    efficient = text.section("efficient_attention_config")
    jet = efficient.section("jet") if efficient is not None else None
    if jet is None:
        return None
    kinds = text.strings("layer_types")
    heads, keys = jet.number("num_heads"), jet.number("head_dim")
    expand = jet.get("expand_v")
    values = int(keys * expand) if isinstance(expand, (int, float)) and 0 < expand <= MAX_LAYERS else keys
    state = StateShape(
        layer_ids=tuple(i for i in every if i < len(kinds) and kinds[i] == "jet"),
        intermediate=heads * values,
        groups=heads,
        heads=heads,
        head_dim=values,
        state=keys,
        kernel=jet.number("conv_size"),
        temporal_itemsize_bytes=_temporal_bytes(top, text),
    )
    return tuple(i for i in every if i < len(kinds) and kinds[i] in ("attn", "swa")), state
