"""Where a process' kernels come from, read from its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Known, Unknown
from sgdiag.releases.packages import compiles_from, cuda_version, distribution_name, runs_from
from sgdiag.sources.kernels_from import Software, find_software
from sgdiag.sources.processes import RESCAN_S, ProcessSource
from sgdiag.sources.procfs import parse_interfaces
from tests.unit.procfs_tree import BASE, Tree

PID = 42
SITE = "/env/lib/python3.12/site-packages"
TORCH = f"{SITE}/torch/lib/libtorch_cuda.so"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    site = tmp_path / "root" / SITE.lstrip("/")
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(
        "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    )
    for record in ("torch-2.9.1+cu128", "flashinfer_python-0.6.3", "sgl_kernel-0.3.21", "numpy-2.0"):
        (site / f"{record}.dist-info").mkdir()
    sglang = site / "sglang-0.5.9.dist-info"
    sglang.mkdir()
    (sglang / "METADATA").write_text(
        "Name: sglang\nRequires-Dist: torch==2.9.1\nRequires-Dist: numpy==2.0\nRequires-Dist: sgl-kernel (==0.3.21)\n"
        "Requires-Dist: flashinfer_python[cu13]==0.6.3\nRequires-Dist: triton>=3.5\n"
        'Requires-Dist: flashinfer-cubin==0.6.3; extra == "all"\n'
    )
    return tmp_path / "root"


def look(tmp_path: Path, disk: Path, *maps: str, environment: dict[str, str] | None = None) -> Software:
    (tmp_path / "proc").mkdir()
    tree = Tree(tmp_path / "proc")
    tree.add(PID, BASE, maps=maps)
    link = tree.root / str(PID) / "root"
    link.unlink()
    link.symlink_to(disk)
    return find_software(tree.proc, PID, environment or {})


def test_packages_pins_and_torch(tmp_path: Path, disk: Path) -> None:
    found = look(tmp_path, disk, TORCH)
    assert found.packages == Known(
        {"torch": "2.9.1+cu128", "sgl-kernel": "0.3.21", "flashinfer-python": "0.6.3"}, f"file:{SITE}"
    )
    assert found.pinned.or_else({}) == {"torch": "2.9.1", "sgl-kernel": "0.3.21", "flashinfer-python": "0.6.3"}
    assert found.torch_cuda == Known("12.8", f"file:{SITE}/torch/version.py")
    assert found.cuda_toolkit == Unknown("no CUDA toolkit in /usr/local/cuda")


def test_a_torch_without_cuda(tmp_path: Path, disk: Path) -> None:
    (disk / SITE.lstrip("/") / "torch" / "version.py").write_text("cuda: Optional[str] = None\n")
    assert look(tmp_path, disk, TORCH).torch_cuda == Unknown("torch was built without CUDA")


def test_a_process_without_torch(tmp_path: Path, disk: Path) -> None:
    found = look(tmp_path, disk, "/usr/lib/libc.so")
    assert found.packages == found.torch_cuda == Unknown("the process has not loaded torch")


def test_toolkits(tmp_path: Path, disk: Path) -> None:
    usual = disk / "usr/local/cuda/include"
    usual.mkdir(parents=True)
    (usual / "cuda.h").write_text("#ifndef X\n#define CUDA_VERSION 12040\n")
    other = disk / "opt/cuda"
    other.mkdir(parents=True)
    (other / "version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "12.9.86"}}')
    assert look(tmp_path, disk, TORCH).cuda_toolkit == Known("12.4", "file:/usr/local/cuda")
    (tmp_path / "second").mkdir()
    chosen = look(tmp_path / "second", disk, TORCH, environment={"CUDA_HOME": "/opt/cuda"})
    assert chosen.cuda_toolkit == Known("12.9", "file:/opt/cuda")


@pytest.mark.parametrize("text", ["", "[]", '{"cuda": 3}', '{"cuda": {"version": 12}}', "{" * 5000])
def test_a_toolkit_that_does_not_say_its_version(tmp_path: Path, disk: Path, text: str) -> None:
    place = disk / "usr/local/cuda"
    place.mkdir(parents=True)
    (place / "version.json").write_text(text)
    assert isinstance(look(tmp_path, disk, TORCH).cuda_toolkit, Unknown)


def test_what_gpus_need() -> None:
    assert runs_from("12.1") == "12.8"
    assert compiles_from("12.1") == "12.9"
    assert compiles_from("12.0") == "12.8"
    assert runs_from("3.5") is None
    assert compiles_from("what") is None


@given(st.text())
def test_any_text_is_a_version_or_none(text: str) -> None:
    assert cuda_version(text) is None or cuda_version(text) >= (0, 0)  # type: ignore[operator]
    assert distribution_name(distribution_name(text)) == distribution_name(text)
    runs_from(text)


def test_interfaces() -> None:
    text = "Inter-|   Receive\n face |bytes\n    lo: 1 2 3\n  eth0:88 9\nbr-1a2b: 0\n\n"
    assert parse_interfaces(text) == ("lo", "eth0", "br-1a2b")
    assert parse_interfaces("") == ()


def test_a_server_that_has_just_started_tells_its_packages_later(tmp_path: Path, disk: Path) -> None:
    (tmp_path / "proc").mkdir()
    tree = Tree(tmp_path / "proc")
    (tree.root / "net" / "dev").write_text("Inter-|\n face |bytes\n    lo: 1 2\n  eth0: 3 4\n")
    now = 1_800_000_000.0
    tree.server(100)
    source = ProcessSource(100, proc=tree.proc, clock=lambda: now)
    first = source.read()
    assert first.server.packages == Unknown("the process has not loaded torch")
    assert first.collectives.interfaces == Known(("lo", "eth0"), "procfs:net/dev")
    tree.add(100, BASE, maps=(TORCH,))
    root = tree.root / "100" / "root"
    root.unlink()
    root.symlink_to(disk)
    now += RESCAN_S
    assert source.read().server.packages.or_else({})["torch"] == "2.9.1+cu128"
