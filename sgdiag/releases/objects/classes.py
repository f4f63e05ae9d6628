"""SGLang's classes that paths go through: short name to dotted name, by release.

``declared_by`` names the class that lists the attributes which SGLang adds to a generic object at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Home(msgspec.Struct, frozen=True):
    """Where a class lives from release ``since`` up to, not including, ``until`` (empty: without bound)."""

    dotted: str
    since: str = ""
    until: str = ""
    declared_by: str = ""

    @property
    def type_name(self) -> str:
        """What Python calls the class: the last part of ``dotted``."""
        return self.dotted.rpartition(".")[2]


def _one(place: str, since: str = "", until: str = "") -> tuple[Home, ...]:
    return (Home(f"sglang.srt.{place}", since, until),)


def _moved(name: str, old: str, until: str, new: str) -> tuple[Home, ...]:
    return (Home(f"sglang.srt.{old}.{name}", until=until), Home(f"sglang.srt.{new}.{name}", since=until))


def _settings(module: str, name: str) -> tuple[Home, ...]:
    """A namespace of the resolved settings, which 0.5.20 and newer keep apart from ``server_args``."""
    return (
        Home(
            "sglang.srt.runtime_context._ConfigBag",
            since="0.5.20",
            declared_by=f"sglang.srt.arg_groups.fields.{module}.{name}",
        ),
    )


_SCHEDULER = {
    "Scheduler": _one("managers.scheduler.Scheduler"),
    "TpModelWorker": _one("managers.tp_worker.TpModelWorker"),
    "ModelRunner": _one("model_executor.model_runner.ModelRunner"),
    "ServerArgs": _one("server_args.ServerArgs", until="0.5.20"),
    "ParallelState": _one("distributed.parallel_state_wrapper.ParallelState", "0.5.13", "0.5.21"),
    "ParallelContext": _one("runtime_context.ParallelContext", "0.5.21"),
    "RuntimeContext": _one("runtime_context.RuntimeContext", "0.5.20"),
    "NewTokenRatioTracker": _one(
        "managers.scheduler_components.new_token_ratio_tracker.NewTokenRatioTracker", "0.5.13"
    ),
    "SchedulerMetricsReporter": _one(
        "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter", "0.5.13"
    ),
    "SchedulerStats": _moved("SchedulerStats", "metrics.collector", "0.5.10", "observability.metrics_collector"),
    "QueueCount": _one("observability.metrics_collector.QueueCount", "0.5.10"),
}

_SETTINGS = {
    "ModelSettings": _settings("model", "Model"),
    "ServingSettings": _settings("serving", "Serving"),
    "DeviceSettings": _settings("device", "Device"),
    "ParallelSettings": _settings("parallel", "Parallel"),
    "ScheduleSettings": _settings("schedule", "Schedule"),
    "MemorySettings": _settings("memory", "Memory"),
    "SpecSettings": _settings("spec", "Spec"),
    "ExecSettings": _settings("exec_", "ExecFeatures"),
    "GraphSettings": _settings("exec_", "ExecGraph"),
    "CommSettings": _settings("exec_", "ExecComm"),
    "KernelSettings": _settings("exec_", "ExecKernel"),
}

_POOLS = {
    "ReqToTokenPool": _one("mem_cache.memory_pool.ReqToTokenPool"),
    "HybridReqToTokenPool": _one("mem_cache.memory_pool.HybridReqToTokenPool"),
    "MambaPool": _one("mem_cache.memory_pool.MambaPool"),
    "MambaSlotAllocator": _one("mem_cache.allocator.mamba.MambaSlotAllocator", "0.5.13"),
    "MHATokenToKVPool": _one("mem_cache.memory_pool.MHATokenToKVPool"),
    "MLATokenToKVPool": _one("mem_cache.memory_pool.MLATokenToKVPool"),
    "HybridLinearKVPool": _one("mem_cache.memory_pool.HybridLinearKVPool"),
    "SWAKVPool": _one("mem_cache.swa_memory_pool.SWAKVPool"),
    "DeepSeekV4TokenToKVPool": _one("mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool", "0.5.12"),
    "MiniMaxSparseKVPool": _one("mem_cache.memory_pool.MiniMaxSparseKVPool", "0.5.15"),
    "TokenToKVPoolAllocator": _moved(
        "TokenToKVPoolAllocator", "mem_cache.allocator", "0.5.13", "mem_cache.allocator.token"
    ),
    "PagedTokenToKVPoolAllocator": _moved(
        "PagedTokenToKVPoolAllocator", "mem_cache.allocator", "0.5.13", "mem_cache.allocator.paged"
    ),
    "SWATokenToKVPoolAllocator": _moved(
        "SWATokenToKVPoolAllocator", "mem_cache.swa_memory_pool", "0.5.13", "mem_cache.allocator.swa"
    ),
}

_CACHES = {
    "RadixCache": _one("mem_cache.radix_cache.RadixCache"),
    "ChunkCache": _one("mem_cache.chunk_cache.ChunkCache", until="0.5.21"),
    "SWARadixCache": _one("mem_cache.swa_radix_cache.SWARadixCache", until="0.5.21"),
    "MambaRadixCache": _one("mem_cache.mamba_radix_cache.MambaRadixCache", until="0.5.21"),
    "RadixCacheCpp": _one("mem_cache.radix_cache_cpp.RadixCacheCpp", until="0.5.21"),
    "UnifiedRadixCache": _one("mem_cache.unified_radix_cache.UnifiedRadixCache", "0.5.11"),
    "UnifiedTreeCore": _one("mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore", "0.5.17"),
    "RustUnifiedTreeCore": _one("mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore", "0.5.20"),
}

_BATCHES = {
    "ScheduleBatch": _one("managers.schedule_batch.ScheduleBatch"),
    "EagleDraftInput": _one("speculative.eagle_info.EagleDraftInput"),
    "EagleDraftExtendInput": _one("speculative.eagle_info.EagleDraftExtendInput", "0.5.12"),
    "EagleVerifyInput": _one("speculative.eagle_info.EagleVerifyInput"),
    "NgramVerifyInput": _one("speculative.ngram_info.NgramVerifyInput"),
    "DFlashVerifyInput": _one("speculative.dflash_info.DFlashVerifyInput", "0.5.11"),
}

_SPECULATION = {
    "EAGLEWorker": _one("speculative.eagle_worker.EAGLEWorker", until="0.5.13"),
    "MultiLayerEagleWorker": _one("speculative.multi_layer_eagle_worker.MultiLayerEagleWorker", until="0.5.13"),
    # Its V2 is a subclass of it in 0.5.12 and 0.5.13, and of EAGLEWorkerV2 from 0.5.14 on.
    "FrozenKVMTPWorker": _one("speculative.frozen_kv_mtp_worker.FrozenKVMTPWorker", "0.5.12", "0.5.14"),
    "EAGLEWorkerV2": _one("speculative.eagle_worker_v2.EAGLEWorkerV2"),
    "EagleDraftWorker": _one("speculative.eagle_worker_v2.EagleDraftWorker"),
    "MultiLayerEagleWorkerV2": _one("speculative.multi_layer_eagle_worker_v2.MultiLayerEagleWorkerV2"),
    "MultiLayerEagleDraftWorker": _one("speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"),
    "FrozenKVMTPDraftWorker": _one("speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker", "0.5.14"),
    "NGRAMWorker": _one("speculative.ngram_worker.NGRAMWorker"),
    "DFlashWorker": _one("speculative.dflash_worker.DFlashWorker", "0.5.11", "0.5.14"),
    "DFlashWorkerV2": _one("speculative.dflash_worker_v2.DFlashWorkerV2", "0.5.14"),
    "AdaptiveController": _one("speculative.adaptive_runtime_state.AdaptiveController", "0.5.11"),
    "AdaptiveSpeculativeParams": _one("speculative.adaptive_spec_params.AdaptiveSpeculativeParams", "0.5.11"),
}

_GRAPHS = {
    "CudaGraphConfig": _one("model_executor.cuda_graph_config.CudaGraphConfig", "0.5.14"),
    "PhaseConfig": _one("model_executor.cuda_graph_config.PhaseConfig", "0.5.14"),
    "CudaGraphRunner": _one("model_executor.cuda_graph_runner.CudaGraphRunner", until="0.5.14"),
    "CPUGraphRunner": _one("model_executor.cpu_graph_runner.CPUGraphRunner"),
    "PiecewiseCudaGraphRunner": _one(
        "model_executor.piecewise_cuda_graph_runner.PiecewiseCudaGraphRunner", until="0.5.14"
    ),
    "BreakableCudaGraphRunner": _one(
        "model_executor.breakable_cuda_graph_runner.BreakableCudaGraphRunner", "0.5.11", "0.5.14"
    ),
    "DecodeCudaGraphRunner": _one("model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner", "0.5.14"),
    "PrefillCudaGraphRunner": _one("model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner", "0.5.14"),
    "FullCudaGraphBackend": _one(
        "model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend", "0.5.14"
    ),
    "BreakableCudaGraphBackend": _one(
        "model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend", "0.5.14"
    ),
    "EAGLEDraftCudaGraphRunner": _one("speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner"),
    "EAGLEDraftExtendCudaGraphRunner": _one(
        "speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"
    ),
    "FrozenKVMTPCudaGraphRunner": _one(
        "speculative.frozen_kv_mtp_cuda_graph_runner.FrozenKVMTPCudaGraphRunner", "0.5.12"
    ),
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner": _one(
        "speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
        ".MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"
    ),
}

_COLLECTIVES = {
    "GroupCoordinator": _one("distributed.parallel_state.GroupCoordinator"),
    "PyNcclCommunicator": _one("distributed.device_communicators.pynccl.PyNcclCommunicator"),
    "CustomAllreduce": _one("distributed.device_communicators.custom_all_reduce.CustomAllreduce"),
    "CustomAllReduceV2": _one("distributed.device_communicators.custom_all_reduce_v2.CustomAllReduceV2", "0.5.10"),
    "PcieIpcCommunicator": _one("distributed.device_communicators.pcie_ipc_ar.PcieIpcCommunicator", "0.5.21"),
    "PyMscclppCommunicator": _one("distributed.device_communicators.pymscclpp.PyMscclppCommunicator"),
    "TorchSymmMemCommunicator": _one("distributed.device_communicators.torch_symm_mem.TorchSymmMemCommunicator"),
    "QuickAllReduce": _one("distributed.device_communicators.quick_all_reduce.QuickAllReduce"),
}

CLASSES: Mapping[str, tuple[Home, ...]] = MappingProxyType(
    {
        **_SCHEDULER,
        **_SETTINGS,
        **_POOLS,
        **_CACHES,
        **_BATCHES,
        **_SPECULATION,
        **_GRAPHS,
        **_COLLECTIVES,
    }
)
