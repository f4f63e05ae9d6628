"""What SGLang was doing, by the files and functions that a traceback passes.

The patterns fit a frame as Python prints it (``File "…/loader.py", line 12, in load_model``) and the shorter ways in
which people quote one. Names were looked up in releases 0.2 to 0.5.23.
"""

from __future__ import annotations

PLACES: dict[str, str] = {
    # The scheduler's loop: whatever is called from here happens with requests at hand.
    "loop": r"\b(?:event_loop_\w+|run_event_loop|dispatch_event_loop|run_batch|forward_batch_\w*generation|"
    r"forward_thread_func_?|process_batch_result\w*|forward_step)\b",
    "capture": r"\b(?:init_cuda_graphs|init_device_graphs|init_\w*(?:cuda|device)_graphs?|_?capture_one_\w+|"
    r"_capture_graphs?|capture_prepare|warmup_compile|warmup_torch_compile)\b|"
    r"graph_runner\.py\W+line \d+,? in (?:capture|__init__|_capture\w*|run_once)\b|cuda_graph_backend\.py",
    "pool": r"\b(?:init_memory_pool|_create_buffers|_init_pools?|alloc_memory_pool|init_kv_pools?)\b|"
    r"(?:memory_pool|kv_cache_configurator|pool_configurator)\.py\W+line \d+,? in (?:__init__|_\w+)",
    "load": r"\b(?:load_model|load_weights\w*|create_weights\w*|process_weights_after_loading|_?initialize_model|"
    r"make_layers|default_weight_loader|weight_loader\w*|_load_w\w+)\b|model_loader/\w+\.py|weight_utils\.py",
    "logits": r"logits_processor|\b(?:_get_logits|_compute_lm_head|compute_logprobs?\w*|get_top_logprobs\w*)\b",
    "sampling": r"layers/sampler|\bsampler\.py|\b(?:top_k_top_p\w*|sampling_from_probs\w*|multinomial)\b|penaltylib",
    "vision": r"\b(?:get_(?:image|video|audio)_features?|general_mm_embed_routine|embed_mm_inputs|"
    r"get_embedding_and_mask|_get_chunked_prefill_embedding\w*)\b|mm_utils\.py|\b(?:vision|siglip|clip|"
    r"\w*vit)\.py|in (?:visual|vision_tower|encode_images)\b",
    "attention": r"\b(?:_chunked_prefix_attn_mha|forward_extend|forward_normal\w*|forward_absorb\w*|"
    r"_attn_mha\w*|merge_state\w*)\b|layers/attention/|radix_attention\.py",
    "experts": r"fused_moe|layers/moe/|deep_gemm|moe_runner",
    "forward": r"models/\w+\.py\W+line \d+,? in \w*forward\w*|\b_forward_raw\b|"
    r"\bforward_(?:decode|idle|split_prefill)\b",
}
"""A pattern for each place, in the order in which they are to be asked: the first that fits says more than the next."""

INNER_PLACES = ("vision", "logits", "sampling", "attention", "experts", "forward")
"""Places within a forward pass, which runs while requests are served, while graphs are captured and at warm-up."""
