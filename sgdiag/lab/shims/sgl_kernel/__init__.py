"""Reference for `sgl_kernel` on any CPU: PyTorch versions of what a CPU SGLang server calls, stand-ins for the rest.

They compute what the compiled kernels compute, slowly and legibly. A name without a reference imports as a `Missing`,
which raises when called, so that an unexpected kernel call is seen and never guessed at.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from sgl_kernel._attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel._cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from sgl_kernel._streams import make_cuda_streams_no_ops
from sgl_kernel._tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

# By name, because the folder is on the path of a lab server only and not where this is type-checked.
standin = importlib.import_module("sgdiag_lab_standin")

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy",
    "verify_tree_greedy_cpu",
]

_SUBMODULES = (
    "allreduce",
    "attention",
    "cutlass_moe",
    "elementwise",
    "flash_attn",
    "flash_mla",
    "fused_moe",
    "gemm",
    "kvcacheio",
    "mamba",
    "marlin",
    "memory",
    "moe",
    "quantization",
    "sampling",
    "scalar_type",
    "sparse_flash_attn",
    "speculative",
    "top_k",
)

# Before 0.5.18 the CUDA branch imports this name when it is about to call it.
verify_tree_greedy = verify_tree_greedy_cpu


class Missing:
    """An importable name without a reference; calling it raises NotImplementedError and says which kernel it was."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the lab has no CPU reference for sgl_kernel.{self._name}")

    def __getattr__(self, name: str) -> Missing:
        if standin.is_dunder(name):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")


def __getattr__(name: str) -> Missing:
    if standin.is_dunder(name):
        raise AttributeError(name)
    return Missing(name)


class _Operator:
    """Callable as `torch.ops.sgl_kernel.NAME` and as its `.default` overload, as a registered operator is."""

    def __init__(self, function: Any) -> None:
        self.default = function

    def __call__(self, *args: Any) -> Any:
        return self.default(*args)


torch.ops.sgl_kernel.decode_attention_cpu = _Operator(decode_attention_cpu)
torch.ops.sgl_kernel.extend_attention_cpu = _Operator(extend_attention_cpu)
standin.install({f"sgl_kernel.{name}": Missing for name in _SUBMODULES})

if "streams" in os.environ.get("SGDIAG_LAB_SHIMS", "").split(",") and not torch.cuda.is_available():
    make_cuda_streams_no_ops()
