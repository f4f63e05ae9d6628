"""A process that looks like a scheduler of SGLang 0.5.9 from outside, as far as Python objects go.

Obeys lines on stdin and answers each with a line: ``step`` (an iteration), ``request`` (one more runs), ``none``
(no batch any more), ``other cache`` (one without sizes), ``cache`` (one with sizes again), ``hang`` (a C call that
keeps the GIL), ``end`` (the scheduler's call returns).
"""

from __future__ import annotations

import ctypes
import enum
import sys
import threading
import types
from typing import Any


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2


class Algorithm(enum.Enum):
    NONE = 0
    EAGLE3 = 1


class EagleDraftInput:
    pass


class ScheduleBatch:
    def __init__(self) -> None:
        self.reqs: list[object] = [object()]
        self.forward_mode = ForwardMode.DECODE
        self.batch_is_full = False
        self.seq_lens_sum = 11
        self.spec_info = EagleDraftInput()


class EAGLEWorker:
    def __init__(self) -> None:
        self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens = 3, 1, 4


def thing(**attributes: object) -> Any:
    return types.SimpleNamespace(**attributes)


class RadixCache:
    def __init__(self) -> None:
        self.evictable_size_, self.protected_size_ = 30, 5


class Slotted:
    __slots__ = ("a_very_long_name",)

    def __init__(self) -> None:
        self.a_very_long_name = 1


class DraftReqKey:
    def __init__(self) -> None:
        self.request, self.text = 7, "s3cret"


class Scheduler:
    def __init__(self, algorithm: str) -> None:
        self.tp_rank, self.pp_rank, self.dp_rank = 0, 0, None
        self.max_total_num_tokens, self.page_size, self.max_running_requests = 100, 2, 8
        self.forward_ct, self.enable_overlap = 7, True
        self.waiting_queue: list[object] = [1, 2]
        self.running_batch: ScheduleBatch | None = ScheduleBatch()
        self.cur_batch = None
        self.last_batch = self.running_batch
        self.req_to_token_pool = thing(size=8, free_slots=[1, 2, 3], max_context_len=64)
        self.token_to_kv_pool_allocator = thing(free_pages=list(range(20)), release_pages=list(range(5)))
        self.tree_cache: Any = RadixCache()
        self.spec_algorithm = Algorithm[algorithm]
        self.draft_worker = EAGLEWorker() if algorithm != "NONE" else None
        self.spec_total_num_forward_ct, self.spec_total_num_accepted_tokens = 4, 10
        self.current_scheduler_metrics_enabled = False
        self.slotted = Slotted()
        self.odd = ["half \udc80", "\x1b[31mred", 1 << 20_000, float("inf")]
        self.server_args = thing(api_key="s3cret", headers=[(b"authorization", b"s3cret")])
        self.draft_key, self.keys_by_token = DraftReqKey(), {4: [4, 5], 5: bytearray(b"s3cret")}
        self.last_gen_throughput = 55.5
        self.stats = thing(cache_hit_rate=0.25, spec_accept_length=2.5)
        runner = thing(weight_load_mem_usage=1.5, mem_fraction_static=float("nan"), graph_mem_usage="text", gpu_id=0)
        self.tp_worker = thing(_model_runner=runner)

    def obey(self, order: str) -> None:
        batch = self.running_batch
        if order == "step":
            self.forward_ct += 1
        elif order == "request" and batch is not None:
            batch.reqs.append(object())
            self.token_to_kv_pool_allocator.free_pages.pop()
        elif order == "none":
            self.running_batch = None
        elif order == "other cache":
            self.tree_cache = thing()
        elif order == "cache":
            self.tree_cache = RadixCache()


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def run_scheduler_process(algorithm: str, *, loads: bool) -> None:
    scheduler = None
    if loads:
        say("ready")
        sys.stdin.readline()
    scheduler = Scheduler(algorithm)
    say("ready")
    while (order := sys.stdin.readline().strip()) not in ("", "end"):
        scheduler.obey(order)
        say(order)
        if order == "hang":
            ctypes.PyDLL(None).sleep(600)


if __name__ == "__main__":
    version = types.ModuleType("sglang.version")
    version.__dict__["__version__"] = sys.argv[1]
    sys.modules["sglang.version"] = version
    threading.Thread(target=threading.Event().wait, name="helper", daemon=True).start()
    run_scheduler_process(sys.argv[2], loads="loads" in sys.argv[3:])
    say("ended")
    sys.stdin.read()
