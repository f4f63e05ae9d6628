"""The features of SGLang whose code has files, functions and words of its own.

Names were looked up in releases 0.4 to 0.5.23. Patterns of ``CODE`` fit a frame as Python prints it
(``…/file.py", line 12, in function``), those of ``WORDS`` what exceptions and error lines say.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from sgdiag.releases.signs.sign import Sign

Feature: TypeAlias = Literal["hicache", "disaggregation", "parallel", "speculation", "weights"]
"""``parallel``: attention DP and the dispatch to experts on other ranks; ``weights``: a model that is built or loaded,
which is here so that nobody else is blamed for it."""

CODE: dict[Feature, str] = {
    "weights": r"model_loader/|, in (?:load_model|load_weights\w*|weight_loader\w*|get_model_config)$"
    r"|models/\w+\.py\", line \d+, in __init__$",
    "hicache": r"(?:hi_?\w{0,9}radix_cache|hicache\w*|cache_controller|memory_pool_host|host_pool|l2_transfer"
    r"|storage_prefetch)\.py|pool_host/|mem_cache/storage/|hybrid_cache/"
    r"|, in \w*(?:hicache|load_back|(?:protect|release)_host)\w*$"
    r"|unified_(?:radix_cache\.py|cache\w*/).{0,60}, in \w*(?:loading|back_?up|writing|prefetch|host)\w*$",
    "disaggregation": r"/disaggregation/.{0,80}, in (?!event_loop)|, in (?!event_loop)\w+_disagg_\w+$|mini_lb\.py"
    r"|nixl/_api\.py",
    "parallel": r"(?:dp_attention|dp_attn\w*|data_parallel_controller|deepep\w*|moriep)\.py|token_dispatcher/|ep_moe/"
    r"|deep_ep/|elastic_ep/|, in (?:low_latency_(?:dispatch|combine)|\w*(?:mlp_sync|deepep)\w*|dp_(?:gather|scatter)"
    r"\w*|set_dp_buffer_len|(?:op_)?(?:dispatch|combine)_[ab])$",
    "speculation": r"/speculative/|(?:eagle|nextn|_mtp|mtp_|ngram_worker|ngram_info|dflash|dspark)\w{0,40}\.py"
    r"|, in \w*(?:draft_extend|forward_draft|_mtp_)\w*$",
}
"""In the order in which they are asked: a frame may lie in the files of one and do the other's work."""

WORDS: dict[Feature, str] = {
    "hicache": r"(?i:hicache)|[Hh]i\w*Radix|[Hh]ierarchical (?:KV )?[Cc]ache|HostKVCache|\bhost_(?:value|indices)\b"
    r"|(?:[Hh]ost|[Hh]ybrid) pool|PoolHost|load_back|[Hh]ost indices|[Mm]ooncake ?[Ss]tore"
    r"|[Mm]ooncake (?:[Ee]mbedding|group_ids|layer|range|get session|load|offload)|\bEIC\b|\beic\b"
    r"|[Ee]xternal linker|[Mm]em[Cc]ache [Ss]tore|\bpacked draft\b|host KV pool|UMBP|LMCache|FlexKV"
    r"|[Hh]f3fs|HF3FS|SiMM|TensorCast|[Hh]ost (?:mamba )?reference counter",
    "disaggregation": r"[Dd]isaggregat|SGLANG_DISAGG|[Bb]ootstrap[ _](?:server|room|port|addr|worker|thread|host)"
    r"|KV(?:Poll|Manager|Sender|Receiver|Args)\b|[Dd]ecode (?:instance|peer|session|worker)|[Pp]refill (?:instance|"
    r"worker|dp_rank|peer)|[Kk][Vv][ _](?:cache )?transfer|NIXL|[Mm]ooncake|[Mm]ori (?:KV )?transfer|transfer worker"
    r"|\bPD\b|[Ee]ncoder (?:HTTP )?request|MMEncoder|[Ss]tate transfer",
    "parallel": r"[Dd]eep_?[Ee][Pp]|moe_a2a|moe-a2a|[Dd][Pp][- _][Aa]ttention|attention[- ]DP|NVSHMEM|nvshmem"
    r"|mlp_sync|MLP[- ][Ss]ync"
    r"|low.latency[ _](?:mode|dispatch|combine)|\bMORI\b|MoriEP|[Ee]xpert.parallel|\bEPMoE|[Tt]oken dispatcher",
    "speculation": r"[Ss]peculat(?:ive|ion)|[Ss]pec[ _-][Vv]2|EAGLE|Eagle|eagle3?\b|DFLASH|DFlash|DSpark|NGRAM"
    r"|NextN|eagle_worker|NEXTN|\bMTP\b|spec_info|\b[Dd]raft(?:s|er|ing|_\w+)?\b|DRAFT_EXTEND|TARGET_VERIFY"
    r"|accept_index",
}
"""What exceptions and error lines of the feature speak of."""

_STRONG: dict[Feature, tuple[str, ...]] = {
    "hicache": (
        *("HiCache", "hicache", "ierarchical cache", "ierarchical KV cache", "enable-hierarchical-cache"),
        *("ooncake store", "ooncake Store", "ooncake offload", "ooncake layer-wise"),
        *("eic mget", "eic mset", "eic client", "MemCache Store", "UMBP"),
    ),
    "disaggregation": (
        "isaggregat",
        "ootstrap server",
        "bootstrap_room",
        "NIXL",
        "KVPoll",
        "ooncake transfer",
        "PD state",
        *("PD rebootstrap", "dp_ranks from bootstrap", "prefill dp_rank", "Mori transfer", "transfer worker"),
        *("ncoder health check", "EncoderBootstrapServer", "MMEncoder", "EmbeddingPool", "STAGING_REQ"),
    ),
    "parallel": (
        *("DeepEP", "deep_ep", "deepep", "NVSHMEM", "nvshmem", "EPMoE", "mlp_sync", "MLP-sync", "MLP sync"),
        *("DP attention", "DP Attention", "DP-attention", "dp attention", "dp_attention", "enable-dp-attention"),
    ),
    "speculation": ("EAGLE", "Eagle", "eagle_worker", "peculative", "spec_info", "draft model", "raft worker"),
}
"""The words that are telling enough for a line that is no exception, and rare in healthy logs."""

_FAILS = (
    r"[Ff]ail|[Ee]rror\b|[Tt]im(?:ed ?|e-?)out|mismatch|[Ee]xception|\b(?:[Hh]ang|[Ss]tuck|[Dd]eadlock|[Cc]rash"
    r"|[Ww]edge)"
    r"|[Uu]nsupported|not support|[Rr]efuse|\bdied\b"
)

_NAMES: dict[Feature, tuple[str, ...]] = {
    "hicache": ("hicache", "HiCache", "hiradix", "HiRadix"),
    "disaggregation": ("disaggregation", "_disagg_"),
    "parallel": ("deep_ep", "deepep", "DeepEP"),
    "speculation": ("eagle", "Eagle", "EAGLE", "speculative", "DFlash", "dflash"),
}
"""What the feature's own functions and classes have in their names."""

SIGNS: tuple[Sign, ...] = (
    *(
        Sign(f"code-{feature}", rf'^(?=.*\.py(?:\\?", line \d|:\d)).*?(?:{pattern})', (".py",))
        for feature, pattern in CODE.items()
    ),
    *(
        Sign(f"trouble-{feature}", rf"^(?!server_args)(?=.*(?:{_FAILS})).*?(?:{'|'.join(words)})", words)
        for feature, words in _STRONG.items()
    ),
    # People quote a function alone, without the frame around it.
    *(
        Sign(f"name-{feature}", rf"^[\w.]{{0,80}}(?:{'|'.join(names)})[\w.]{{0,80}}(?:\(\))?$", names)
        for feature, names in _NAMES.items()
    ),
)
