"""The command line and environment of a lab server: pure, from a release's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sgdiag.lab.errors import LabError
from sgdiag.lab.releases import Release

HOST = "127.0.0.1"
DRAFT_STEPS = 3
MAX_TOKENS = 20000
THREADS_PER_PROCESS = 1
MARK_VARIABLE = "SGDIAG_LAB_MARK"

_OWN_FLAGS = ("--api-key", "--host", "--model-path", "--model", "--port")

# Names under which a caller's own environment would change what the server loads or how it computes.
_DROPPED_PREFIXES = ("SGLANG_", "SGL_", "PYTHON", "TRITON_", "TORCH_", "CUDA_", "NCCL_", "OMP_", "MKL_", "KMP_")


def draft_tokens(topk: int) -> int:
    """Tokens verified at once: the chain and its bonus for one branch, a tree of 16 nodes for several."""
    return DRAFT_STEPS + 1 if topk == 1 else 16


class Wanted(msgspec.Struct, frozen=True):
    """A server as asked for; `accept` is the share of right drafts, `layers` and `seed` make the target model."""

    release: Release
    speculative: bool = False
    topk: int = 1
    tp: int = 1
    accept: float = 0.8
    layers: int = 4
    seed: int = 0
    api_key: str | None = None
    extra_args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


def check(wanted: Wanted) -> None:
    """LabError unless such a server can be started at all."""
    if not 0.0 <= wanted.accept <= 1.0:
        raise LabError(f"--accept is a share of tokens; give a number from 0 to 1, not {wanted.accept}")
    if wanted.layers not in range(3, 65):
        raise LabError(f"{wanted.layers} layers are out of range; give 3, the least the draft can listen to, to 64")
    if wanted.topk not in range(1, 9):
        raise LabError(f"--topk {wanted.topk} is out of range; give 1 to 8")
    if wanted.topk > 1 and not wanted.speculative:
        raise LabError("--topk means nothing without --speculative; add it")
    if wanted.tp not in (1, 2, 4):
        raise LabError(f"--tp {wanted.tp} does not divide the model's 4 key/value heads; give 1, 2 or 4")
    if wanted.release.interpreted and wanted.tp > 1:
        raise LabError(f"SGLang {wanted.release.version} serves with --tp 1 only here; use 0.5.20 or later")
    _check_extra(wanted.extra_args)


def _check_extra(extra: Sequence[str]) -> None:
    """LabError if further words for SGLang are no flags, or take away what the lab relies on."""
    if extra and not extra[0].startswith("-"):
        raise LabError(f"{extra[0]!r} is no SGLang flag; put flags behind --, and give the lab's name with --name")
    for word in extra:
        if word.partition("=")[0] in _OWN_FLAGS:
            raise LabError(f"the lab sets {word.partition('=')[0]} itself; use its own options")


def arguments(wanted: Wanted, models: Path, port: int) -> tuple[str, ...]:
    """Arguments for `python -m sglang.launch_server`; `extra_args` come last, so that they win."""
    release = wanted.release
    words = ["--model-path", str(models / "target"), "--device", "cpu", "--host", HOST, "--port", str(port)]
    words += ["--attention-backend", release.speculative_attention if wanted.speculative else release.attention]
    words += ["--disable-cuda-graph", "--grammar-backend", "none", "--enable-metrics"]
    # An idle scheduler would otherwise keep a core busy, and a lab mostly idles.
    words += ["--sleep-on-idle"]
    words += ["--mem-fraction-static", "0.3", "--max-total-tokens", str(MAX_TOKENS)]
    if wanted.tp > 1:
        words += ["--tp", str(wanted.tp)]
    if wanted.speculative:
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(models / "draft")]
        words += ["--speculative-num-steps", str(DRAFT_STEPS), "--speculative-eagle-topk", str(wanted.topk)]
        words += ["--speculative-num-draft-tokens", str(draft_tokens(wanted.topk))]
    if wanted.api_key is not None:
        words += ["--api-key", wanted.api_key]
    return (*words, *wanted.extra_args)


def environment(
    wanted: Wanted,
    base: Mapping[str, str],
    *,
    python_path: Sequence[Path],
    cache: Path,
    tmp: Path,
    mark: str,
    cores: int = 1,
) -> dict[str, str]:
    """The server's environment: the caller's without what would change it, the release's, then `wanted.env`.

    `python_path` is the overlay, then the shims; `mark` tells the server's processes from all others.
    """
    env = {key: value for key, value in base.items() if not key.startswith(_DROPPED_PREFIXES)}
    threads = str(THREADS_PER_PROCESS)
    env |= {
        "PYTHONPATH": ":".join(map(str, python_path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang takes its CPU branches only where torch sees no GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache / "huggingface"),
        "SGLANG_CACHE_DIR": str(cache / "sglang"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TMPDIR": str(tmp),
        # A proxy would get between the server and its own warm-up request.
        "no_proxy": "127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
        MARK_VARIABLE: mark,
    }
    if wanted.tp > 1:
        # One core per rank; ranks that share one are slow but right.
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(wanted.tp))
    env |= wanted.release.env
    if wanted.speculative:
        env |= wanted.release.speculative_env
        if wanted.topk > 1:
            env |= wanted.release.tree_env
    return env | dict(wanted.env)
