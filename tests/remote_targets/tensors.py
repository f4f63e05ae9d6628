"""A process with torch tensors of known form."""

from __future__ import annotations

import sys
from typing import Any

import torch


class Holder:
    def __init__(self) -> None:
        counted = torch.arange(10)
        self.counted = counted
        self.view = counted[3:7]
        self.matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        self.turned = torch.arange(24, dtype=torch.int32).reshape(4, 6).t()
        self.scalar = torch.tensor(3.25, dtype=torch.float64)
        self.flags = torch.tensor([True, False, True])
        self.empty = torch.empty(0, 7)
        self.seven = torch.empty(1, 2, 3, 4, 5, 6, 7, device="meta", dtype=torch.float8_e4m3fn)
        self.parameter = torch.nn.Parameter(torch.ones(5, 2))
        self.cache = torch.zeros(2, 1000, 8, 128, dtype=torch.bfloat16)
        self.kind = torch.bfloat16
        self.device = torch.device("cuda:3")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(holder: Any) -> None:
    say("ready")
    sys.stdin.read()


if __name__ == "__main__":
    serve(Holder())
