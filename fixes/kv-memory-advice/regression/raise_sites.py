"""Makes SGLang's own functions raise its two errors about KV memory, with free memory given, and prints them.

    python raise_sites.py RELEASE

Runs in the interpreter that imports SGLang. Where a server's context is asked for, stand-ins give what a single rank
without graphs, pipeline or hybrid layers has.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

BEFORE_LOAD_GIB, AFTER_LOAD_GIB, FRACTION = 95.0, 21.78, 0.55

# The modules by release, the newest first.
PROFILE = ("sglang.srt.mem_cache.kv_cache_configurator", "sglang.srt.model_executor.model_runner_kv_cache_mixin")
POOL_CONFIG = ("sglang.srt.model_executor.pool_configurator", "sglang.srt.model_executor.model_runner_kv_cache_mixin")


def first(names: tuple[str, ...]) -> ModuleType:
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    sys.exit(f"none of {', '.join(names)} can be imported")


def say(raises: Callable[[], object]) -> None:
    try:
        raises()
    except (RuntimeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")  # noqa: T201 - read by the test


def runner(owner: Any, schedule: SimpleNamespace) -> SimpleNamespace:
    made = SimpleNamespace(
        device="cpu",
        gpu_id=0,
        server_args=schedule,
        mem_fraction_static=FRACTION,
        mambaish_config=None,
        is_draft_worker=False,
        is_hybrid_swa=False,
        post_capture_kv_active=False,
        pp_size=1,
        num_effective_layers=4,
        get_cell_size_per_token=lambda _layers: 1024,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        model_config=SimpleNamespace(is_multimodal=False, context_len=2048),
    )
    made.profile_max_num_token = lambda total: owner.profile_max_num_token(made, total)
    return made


def main(release: str) -> None:
    home = first(PROFILE)
    owner: Any = getattr(home, "KVCacheConfigurator", None) or home.ModelRunnerKVCacheMixin
    schedule = SimpleNamespace(
        mem_fraction_static=FRACTION,
        max_running_requests=8,
        max_total_tokens=None,
        max_mamba_cache_size=None,
        prefill_max_requests=None,
        page_size=1,
        mm_feature_transport=None,
    )
    group = SimpleNamespace(cpu_group=None, world_size=1, launch_world_size=1)
    group.world_group = group
    stands_in: dict[str, Any] = dict.fromkeys(("get_world_group", "get_parallel"), lambda: group)
    stands_in |= dict.fromkeys(("get_mm", "get_exec", "get_disagg"), MagicMock())
    stands_in["get_schedule"] = lambda: schedule
    stands_in["get_available_gpu_memory"] = lambda *_, **__: AFTER_LOAD_GIB
    with contextlib.ExitStack() as stack:
        for name, value in stands_in.items():
            if hasattr(home, name):
                stack.enter_context(patch.object(home, name, value))
        if release == "0.5.9":
            say(lambda: owner.init_memory_pool(runner(owner, schedule), BEFORE_LOAD_GIB))
            return
        profile = getattr(owner, "_profile_available_bytes", None) or owner.profile_max_num_token
        say(lambda: profile(runner(owner, schedule), BEFORE_LOAD_GIB))
    say(lambda: first(POOL_CONFIG).MemoryPoolConfig(max_total_num_tokens=0, max_running_requests=8))


if __name__ == "__main__":
    main(sys.argv[1])
