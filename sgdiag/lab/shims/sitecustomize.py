"""Runs in every Python process of a lab server, before SGLang: adapts releases without a CPU branch where asked to.

`SGDIAG_LAB_SHIMS` is a comma list: `streams` (CUDA streams and events do nothing), `tree` (the speculative modules
use the reference tree kernels), `table` (tokens come from a table, in steps as short as a GPU's; 0.5.23) and `hang`
(SIGUSR2 lets a process hang as a lost kernel or lock would). Modules are changed right after they are imported, never
on disk.
"""

# The finder and loader methods have the parameters that importlib gives them.
# ruff: noqa: ARG002

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


def _use_reference_tree(module: ModuleType) -> None:
    import sgl_kernel

    module.__dict__.update(
        sgl_build_tree_kernel_efficient=sgl_kernel.build_tree_kernel_efficient_cpu,
        verify_tree_greedy=sgl_kernel.verify_tree_greedy,
        _is_cuda=True,
    )


def _take_cuda_branch(module: ModuleType) -> None:
    # The CUDA branch launches Triton kernels, and Triton's interpreter runs those on CPU tensors.
    module.__dict__["_is_cuda"] = True


def _answer_from_a_table(module: ModuleType) -> None:
    importlib.import_module("sgdiag_lab_table").install(module)


_HANG_S = 600

_HOOKS: Mapping[str, Mapping[str, Callable[[ModuleType], None]]] = {
    "tree": {
        "sglang.srt.speculative.eagle_utils": _use_reference_tree,
        "sglang.srt.speculative.eagle_info_v2": _take_cuda_branch,
        "sglang.srt.speculative.spec_utils": _take_cuda_branch,
        "sglang.srt.speculative.triton_ops.cache_locs": _take_cuda_branch,
    },
    "table": {"sglang.srt.model_executor.runner.eager_runner": _answer_from_a_table},
}


class _HookedLoader(importlib.abc.Loader):
    """Loads a module as its own loader would, then hands it to the hook."""

    def __init__(self, loader: importlib.abc.Loader, hook: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook(module)


class _HookFinder(importlib.abc.MetaPathFinder):
    """Finds the hooked modules where Python would, and wraps their loaders."""

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if hook else None
        if hook is None or spec is None or spec.loader is None:
            return None
        spec.loader = _HookedLoader(spec.loader, hook)
        return spec


def _hang(_number: int, _frame: object) -> None:
    # PyDLL keeps the GIL during the call, so that no other Python thread runs either.
    ctypes.PyDLL(None).sleep(_HANG_S)


_shims = os.environ.get("SGDIAG_LAB_SHIMS", "").split(",")
for _hooks in (_HOOKS[shim] for shim in _shims if shim in _HOOKS):
    sys.meta_path.insert(0, _HookFinder(_hooks))
if "hang" in _shims:
    signal.signal(signal.SIGUSR2, _hang)
