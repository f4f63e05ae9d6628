"""The CUDA source builds for every GPU that it is for, and says what the protocol asks; the layout of a mailbox."""

from __future__ import annotations

import ctypes
import itertools
import re
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.pcie_allreduce.gputest.mistakes import MISTAKES, with_mistake
from kernels.pcie_allreduce.gputest.proof import with_proof
from kernels.pcie_allreduce.protocol.programs import Algorithm
from kernels.pcie_allreduce.runtime import compiler
from kernels.pcie_allreduce.runtime.driver import AllreduceError
from kernels.pcie_allreduce.runtime.layout import (
    CONTROL_BYTES,
    KERNELS,
    MAX_BLOCKS,
    MAX_THREADS,
    SLOTS,
    WORLD_SIZES,
    lay_out,
    limit,
    shape_of,
    units_of,
)
from kernels.pcie_allreduce.runtime.source import ENTRIES, argument_type, entries, kernel_version, macros, source

GPUS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
NEWER_THAN_NVRTC = (99, 0)

builds = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NVRTC is installed on Linux only")


def test_the_checked_model_has_every_kernel() -> None:
    assert get_args(Algorithm) == KERNELS


# --- the mailbox

sizes = st.integers(16, 8 << 20)


@given(st.sampled_from(WORLD_SIZES), sizes)
def test_regions_follow_each_other_and_hold_what_belongs_there(ranks: int, size: int) -> None:
    layout = lay_out(ranks, size)
    starts = [
        layout.packets,
        layout.packet_partials,
        layout.flags,
        layout.sentinels,
        layout.sentinel_partials,
        layout.data,
        layout.slot_bytes,
    ]
    rooms = [after - before for before, after in itertools.pairwise(starts)]
    packets, sentinels = layout.packet_bytes // 8, layout.max_bytes // 16
    assert rooms[0] == ranks * packets * 16
    assert rooms[1] == 2 * packets * 16
    assert rooms[2] >= 2 * ranks * MAX_BLOCKS * 4
    assert rooms[3] == ranks * sentinels * 16
    assert rooms[4] == 2 * sentinels * 16
    assert ranks * sentinels * 16 <= rooms[5] < ranks * sentinels * 16 + 128
    assert all(start % 16 == 0 for start in starts)
    assert layout.max_bytes >= size
    assert layout.total_bytes >= CONTROL_BYTES + SLOTS * layout.slot_bytes
    assert CONTROL_BYTES >= 4 * MAX_BLOCKS + 8


@pytest.mark.parametrize(("ranks", "size"), [(3, 1024), (0, 1024), (16, 1024), (2, 0), (2, -5)])
def test_groups_and_sizes_without_kernels_are_refused_in_one_line(ranks: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"^.+$"):
        lay_out(ranks, size)


def test_islands_are_for_four_ranks_and_more_and_packets_for_small_messages() -> None:
    assert [limit(lay_out(2, 1 << 20), kernel) for kernel in ("island-packet", "island-sentinel")] == [0, 0]
    assert limit(lay_out(4, 1 << 20), "island-sentinel") == 1 << 20
    assert limit(lay_out(4, 1 << 20), "two-packet") == 256 << 10
    assert limit(lay_out(4, 1 << 10), "packet") == 1 << 10


@given(st.sampled_from(KERNELS), st.integers(1, 1 << 20))
def test_a_launch_has_a_place_for_every_unit(kernel: str, grains: int) -> None:
    blocks, threads = shape_of(kernel, 16 * grains)
    assert 1 <= blocks <= MAX_BLOCKS
    assert threads % 32 == 0 and threads <= MAX_THREADS
    assert units_of(kernel, 16 * grains) == grains * (2 if kernel.endswith("packet") else 1)


# --- the source


@builds
@pytest.mark.parametrize("gpu", GPUS)
def test_it_builds_for_every_gpu(gpu: tuple[int, int]) -> None:
    image = compiler.compiled(source(), gpu, macros(lay_out(8, 1 << 20), "bf16", 1))
    assert image.startswith(b"\x7fELF")
    for name in ENTRIES:
        assert name.replace("-", "_").encode() in image


@builds
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, "fp32"), (2, "bf16"), (4, "fp16"), (6, "bf16"), (8, "fp32"), (8, "fp16")]
)
def test_it_builds_for_every_group_and_type(ranks: int, dtype: str) -> None:
    layout = lay_out(ranks, 1 << 16)
    image = compiler.compiled(source(), (9, 0), macros(layout, dtype, ranks))
    assert all(name.replace("-", "_").encode() in image for name in entries(layout))
    assert (b"island" in image) == (ranks >= 4)


@builds
def test_what_the_gpu_test_adds_builds() -> None:
    image = compiler.compiled(with_proof(source()), (9, 0), macros(lay_out(2, 1 << 16), "fp32", 2))
    assert b"soak" in image


@builds
def test_a_gpu_newer_than_the_compiler_gets_ptx() -> None:
    assert compiler.compiled('extern "C" __global__ void k() {}', NEWER_THAN_NVRTC, {}).lstrip().startswith(b"//")


@builds
@pytest.mark.parametrize(
    ("text", "gpu", "said"),
    [
        ("int main( {", (9, 0), "NVRTC for sm_90: .*error"),
        ("", (7, 5), "compute capability 7.5; the kernels need 8.0"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(text: str, gpu: tuple[int, int], said: str) -> None:
    with pytest.raises(AllreduceError, match=rf"^[^\n]*{said}[^\n]*$"):
        compiler.compiled(text, gpu, {})


@builds
def test_a_build_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def compiled(*key: object) -> bytes:
        made.append(key)
        return b"code"

    monkeypatch.setattr(compiler, "BUILT", {})
    monkeypatch.setattr(compiler, "compiled", compiled)
    assert compiler.build("a", (9, 0), {"N": 1}) == compiler.build("a", (9, 0), {"N": 1}) == b"code"
    compiler.build("a", (9, 0), {"N": 2})
    assert len(made) == 2


@builds
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_arguments_lie_where_the_source_looks_for_them(ranks: int) -> None:
    rank = argument_type(ranks)
    names = {"input": "in", "output": "out"}
    checks = [f"static_assert(sizeof(Rank) == {ctypes.sizeof(rank)});"]
    checks += [
        f"static_assert(__builtin_offsetof(Rank, {names.get(name, name)}) == {getattr(rank, name).offset});"
        for name in (field[0] for field in rank._fields_)
    ]
    defined = macros(lay_out(ranks, 1 << 16), "bf16", 1)
    compiler.compiled(source() + "\n".join(checks), NEWER_THAN_NVRTC, defined)
    with pytest.raises(AllreduceError):
        compiler.compiled(source() + checks[0].replace("==", "== 1 +"), NEWER_THAN_NVRTC, defined)


def test_the_version_is_the_sources() -> None:
    assert re.fullmatch("[0-9a-f]{12}", kernel_version())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistakes_for_the_gpu_test_still_have_their_place(mistake: str) -> None:
    assert with_mistake(source(), *MISTAKES[mistake]) != source()
    with pytest.raises(ValueError, match="0 places in the source"):
        with_mistake("", *MISTAKES[mistake])


# --- the instructions


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """The kernels' text by name, without the functions that they call."""
    text = compiler.compiled(source(), NEWER_THAN_NVRTC, macros(lay_out(8, 1 << 20), "bf16", 1)).decode()
    bodies = re.split(r"(?=^\.(?:visible|func|weak|extern)\b)", text, flags=re.MULTILINE)
    found = {}
    for body in bodies:
        name = re.match(r"\.visible \.entry (\w+)\(", body)
        if name:
            found[name[1].replace("_", "-")] = body
    return found


FLAGGED = ["flag", "pull", "two-flag", "two-pull", "flag-norm", "pull-norm"]
PROVING = [name for name in ENTRIES if name not in FLAGGED and "copy" not in name]


@builds
@pytest.mark.parametrize("name", PROVING)
def test_words_that_prove_their_arrival_are_whole_and_need_no_fence(name: str, ptx: dict[str, str]) -> None:
    """A vector of two 64-bit words is two accesses of 64 bits each, and each of them is whole."""
    stores = re.findall(r"\bst\.relaxed\.sys\.global\.v2\.[ub]64\b", ptx[name])
    assert len(stores) >= (3 if "island" in name else 7)
    assert re.search(r"\bld\.relaxed\.sys\.global\.v2\.[ub]64\b", ptx[name])
    assert not re.search(r"\b(?:fence|membar|st\.release|ld\.acquire)\b", ptx[name])


@builds
@pytest.mark.parametrize("name", FLAGGED)
def test_a_flag_is_released_after_the_data_and_acquired_before_them(name: str, ptx: dict[str, str]) -> None:
    text = ptx[name]
    release, acquire = text.index("st.release.sys.global"), text.index("ld.acquire.sys.global")
    barriers = [found.start() for found in re.finditer(r"\bbar(?:rier)?\.sync\b", text)]
    assert any(at < release for at in barriers)
    assert any(at > acquire for at in barriers)
    assert text.count("st.release.sys.global") == (2 if name.startswith("two") else 1)


@builds
def test_nothing_is_atomic_between_gpus(ptx: dict[str, str]) -> None:
    """GPUs that see each other over PCIe have no atomics for each other's memory."""
    assert set(ptx) == set(ENTRIES)
    for text in ptx.values():
        assert not re.search(r"\b(?:atom|red|multimem)\b", text)


@builds
def test_no_load_may_come_from_a_cache_that_peers_do_not_reach(ptx: dict[str, str]) -> None:
    for text in ptx.values():
        assert not re.search(r"\bld\.global\.(?:nc|ca)\b", text)
