"""CUDA graphs of SGLang 0.5.9 on a CPU: its own graph runner, whose graphs are functions that run again.

Everything about a graph but the graph itself is the release's: which sizes and widths are captured, the buffers that a
step is copied into, padding, attention metadata. ``install`` edits a copy of the package; the rest runs in the server.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MODULE = "sglang/srt/model_executor/eager_graphs.py"


def edit(root: Path, path: str, before: str, after: str) -> None:
    """Replace the one place in a file of the package under ``root`` that reads ``before``."""
    file = root / "sglang" / "srt" / path
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, (path, before)
    file.write_text(text.replace(before, after), encoding="utf-8")


def install(root: Path) -> None:
    """Let the server of the package under ``root`` capture the target's graphs on a CPU."""
    shutil.copy(__file__, root / _MODULE)
    edit(
        root,
        "model_executor/model_runner.py",
        '        if self.device == "cpu" and not self.server_args.enable_torch_compile:\n',
        "        if self.is_draft_worker:\n",
    )
    edit(
        root,
        "model_executor/model_runner.py",
        '                "cpu": CPUGraphRunner,\n',
        '                "cpu": __import__("sglang.srt.model_executor.eager_graphs", fromlist=["x"]).runner_class(),\n',
    )
    edit(
        root,
        "model_executor/forward_batch_info.py",
        "    def is_cpu_graph(self):\n        return self == ForwardMode.DECODE\n",
        "    def is_cpu_graph(self):\n        return self.is_cuda_graph()\n",
    )


class Graph:
    """What was captured: the function, the attention metadata that it used, and the tensors it gave."""

    def __init__(self) -> None:
        self.backend: Any = None
        self.metadata: Any = None
        self.function: Callable[[], Any] = lambda: None
        self.output: Any = None

    def capture(self, backend: Any, function: Callable[[], Any]) -> Any:
        self.backend, self.metadata, self.function = backend, backend.forward_metadata, function
        self.output = function()
        return self.output

    def replay(self) -> None:
        """Run it again, into the same tensors."""
        self.backend.forward_metadata = self.metadata
        output = self.function()
        self.output.next_token_logits.copy_(output.next_token_logits)
        if output.hidden_states is not None:
            self.output.hidden_states.copy_(output.hidden_states)


def runner_class() -> Any:
    """SGLang's graph runner with such graphs."""
    import torch
    from sglang.srt.model_executor import cuda_graph_runner

    class EagerGraphRunner(cuda_graph_runner.CudaGraphRunner):  # type: ignore[misc]
        def capture(self) -> None:
            cuda_graph_runner.set_global_graph_memory_pool(0)
            self.stream, self.device_module = None, torch.cpu
            for size in reversed(self.capture_bs):
                graph, output = self.capture_one_batch_size(size, self.model_runner.model.forward)
                self.graphs[size], self.output_buffers[size] = graph, output

        def _create_device_graph(self) -> Graph:
            return Graph()

        def _capture_graph(self, graph: Graph, _pool: Any, _stream: Any, run_once_fn: Callable[[], Any]) -> Any:
            return graph.capture(self.model_runner.attn_backend, run_once_fn)

    return EagerGraphRunner
