"""A model that attends says the same with the switch as a plain server. Run by `sgdiag verify-fix`.

The lab's own target says what its table says whatever its KV cache holds, so it cannot tell a wrong slot, position or
length. Here its blocks are random: each token depends on all that are before it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_dynamic_speculation_disable import FLAG, LAB_RELEASE, ON_THE_LAB, RELEASE, ROOT, SLOW

from sgdiag import lab
from sgdiag.lab import build, home, loading
from sgdiag.lab.client import Client, Generation
from sgdiag.lab.state import Lab

pytestmark = [ON_THE_LAB, pytest.mark.timeout(900)]

THRESHOLD = 2
LONG, SHORT, PAUSE_S = (44, 4, 8.0) if SLOW else (200, 12, 0.3)
PROMPTS = [[(13 * i + 7 * j * (i + 1)) % 500 + 2 for j in range(5 + 3 * i)] for i in range(2 * THRESHOLD + 3)]
NAME = f"attention-across-switches-{os.getpid()}"


def randomise(path: Path) -> None:
    """Fill the blocks' weights, bfloat16, with random signs and mantissas: 0.03 to 0.06, and four times that where
    attention is added to what it saw."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    generator = random.Random(0)  # noqa: S311 - weights, no secret
    for name, tensor in json.loads(data[8 : 8 + length]).items():
        if ".layers." not in name or "norm" in name:
            continue
        assert tensor["dtype"] == "BF16"
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        exponent = 124 if "o_proj" in name else 122
        low = bytes(value & 0x7F | (exponent & 1) << 7 for value in range(256))
        high = bytes(value & 0x80 | exponent >> 1 for value in range(256))
        data[begin:end:2] = generator.randbytes((end - begin) // 2).translate(low)
        data[begin + 1 : end : 2] = generator.randbytes((end - begin) // 2).translate(high)
    path.write_bytes(data)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts a server of the patched package with such a target; the one before is ended."""
    shutil.copytree(build.models(4, 0.8, 0, lambda _: None), tmp_path / "models")
    randomise(tmp_path / "models/target/model.safetensors")
    monkeypatch.setattr(build, "models", lambda *_: tmp_path / "models")
    # The lab would compare the first tokens with the table.
    monkeypatch.setattr(loading, "check_output", lambda *_, **__: SimpleNamespace(wrong_tokens=0))

    def start(*arguments: str, **options: Any) -> Lab:
        stop()
        python_path = os.pathsep.join(map(str, (ROOT, home.overlay_dir(LAB_RELEASE), home.shims_dir())))
        # In float32 two ways to compute the same do not come to different tokens.
        words = ["--dtype", "float32", "--decode-log-interval", "1", "--max-running-requests", "8", *arguments]
        if SLOW:
            words += ["--triton-attention-num-kv-splits", "1"]
        return lab.up(LAB_RELEASE, name=NAME, env={"PYTHONPATH": python_path}, extra_args=words, **options)

    def stop() -> None:
        if any(known.name == NAME for known in lab.labs()):
            lab.down(NAME)

    yield start
    stop()


def generate(target: Lab, prompt: list[int], tokens: int) -> Generation:
    client = Client(target)
    try:
        return client.generate(prompt, tokens, 600.0)
    finally:
        client.close()


@pytest.mark.parametrize(
    "topk",
    [
        1,
        pytest.param(
            4, marks=pytest.mark.skipif(SLOW and RELEASE != "0.5.9", reason="trees switch in 0.5.9 and from 0.5.18 on")
        ),
    ],
)
def test_tokens_depend_on_the_cache_and_on_no_switch(serve: Any, topk: int) -> None:
    long, *short = PROMPTS
    plain = serve()
    expected = [generate(plain, long, LONG).tokens, *(generate(plain, prompt, SHORT).tokens for prompt in short)]
    other_context = generate(plain, [long[0] + 1, *long[1:]], LONG).tokens
    assert sum(a != b for a, b in zip(other_context, expected[0], strict=True)) > LONG // 2

    target = serve(FLAG, str(THRESHOLD), speculative=True, topk=topk)

    def wave(prompts: list[list[int]]) -> list[tuple[int, ...]]:
        return list(crowd.map(lambda prompt: generate(target, prompt, SHORT).tokens, prompts))

    with ThreadPoolExecutor(1) as alone, ThreadPoolExecutor(THRESHOLD + 1) as crowd:
        running = alone.submit(generate, target, long, LONG)
        answers = wave(short[: THRESHOLD + 1])
        time.sleep(PAUSE_S)
        answers += wave(short[THRESHOLD + 1 :])
        answers.insert(0, running.result().tokens)
    assert answers == expected
    text = Path(target.log).read_text(encoding="utf-8", errors="replace")
    steps = [
        re.search(r"accept len: (?!0\.00)", line) is not None for line in text.splitlines() if "Decode batch" in line
    ]
    switches = sum(one != other for one, other in pairwise(steps))
    # Off with the first wave, on, off with the second, and on again.
    assert switches >= 3, steps
