"""CUDA streams and events for code that takes them for granted: one stream, on which everything is already done."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


class Stream:
    """A stream that has always caught up; every method it is asked for does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.cuda_stream = 0
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class Event(Stream):
    """An event that happened at once."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Event) -> float:
        return 0.0


def make_cuda_streams_no_ops() -> None:
    """Replace the stream functions of `torch.cuda` for this process."""
    cuda = torch.cuda
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.synchronize = cuda.empty_cache = cuda.set_stream = _nothing
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    # Releases of that age choose their Triton kernels by this; 9.0 is the branch that needs no CUDA library.
    cuda.get_device_capability = lambda *_device: (9, 0)
    torch.Tensor.record_stream = _nothing
