"""torch tensors of a live process, read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sgdiag.remote import Execute, Group, LayoutCache, Limits, Origin, Reader, Status, Tensor, plain
from tests.remote_targets.harness import LAB_PYTHON, running

pytestmark = pytest.mark.skipif(not LAB_PYTHON.exists(), reason="the lab's environment with torch is not built")


@pytest.fixture(scope="module", params=[Execute.WAIT, Execute.NEVER], ids=lambda way: way.value)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    cache = LayoutCache(tmp_path_factory.mktemp("cache") / "layouts")
    with running(LAB_PYTHON, "tensors") as target, Reader(target.pid, execute=request.param, cache=cache) as reader:
        measured = request.param is Execute.WAIT
        assert reader.calibration.note == ""
        assert reader.calibration.origin is (Origin.MEASURED if measured else Origin.TABLE)
        reader.set_root("holder", reader.find_local("serve", "holder"))
        yield reader


def tensor(reader: Reader, path: str, elements: int = 1024) -> Tensor:
    result = reader.read(Group([path], limits=Limits(tensor_elements=elements))).results[path]
    assert result.status is Status.CONSISTENT, result
    assert isinstance(result.value, Tensor)
    return result.value


def test_shapes_strides_and_storages(reader: Reader) -> None:
    counted, view = tensor(reader, "holder.counted"), tensor(reader, "holder.view")
    assert (counted.shape, counted.stride, counted.dtype, counted.device) == ((10,), (1,), "int64", "cpu")
    assert (counted.elements, counted.storage_bytes, counted.storage_offset) == (10, 80, 0)
    assert (view.shape, view.storage_offset, view.storage_bytes) == ((4,), 3, 80)
    assert view.data_address == counted.data_address + 24
    turned = tensor(reader, "holder.turned")
    assert (turned.shape, turned.stride, turned.dtype) == ((6, 4), (1, 6), "int32")
    cache = tensor(reader, "holder.cache")
    assert (cache.shape, cache.dtype, cache.storage_bytes) == ((2, 1000, 8, 128), "bfloat16", 2 * 2 * 1000 * 8 * 128)
    seven = tensor(reader, "holder.seven")
    assert (seven.shape, seven.device, seven.dtype) == ((1, 2, 3, 4, 5, 6, 7), "meta", "float8_e4m3fn")
    assert tensor(reader, "holder.parameter").shape == (5, 2)


def test_values_of_small_tensors_in_host_memory(reader: Reader) -> None:
    assert tensor(reader, "holder.counted").data == tuple(range(10))
    assert tensor(reader, "holder.view").data == (3, 4, 5, 6)
    assert tensor(reader, "holder.matrix").data == tuple(float(i) for i in range(12))
    assert tensor(reader, "holder.scalar").data == (3.25,)
    assert tensor(reader, "holder.flags").data == (True, False, True)
    assert tensor(reader, "holder.empty").data == ()
    for path in ("holder.turned", "holder.cache", "holder.seven"):
        assert tensor(reader, path).data is None
    assert tensor(reader, "holder.counted", elements=9).data is None


def test_lengths_kinds_and_devices(reader: Reader) -> None:
    paths = ["len(holder.cache)", "len(holder.scalar)", "holder.kind", "holder.device", "holder.counted.shape"]
    results = reader.read(Group(paths)).results
    assert results["len(holder.cache)"].value == 2
    assert results["len(holder.scalar)"].reason == "a tensor of no dimensions has no length"
    assert plain(results["holder.kind"].value) == {"dtype": "bfloat16"}
    assert plain(results["holder.device"].value) == {"device": "cuda:3"}
    assert results["holder.counted.shape"].status is Status.OPAQUE


def test_without_a_layout_of_torch_tensors_are_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgdiag.remote.interpreter.TORCH_LIBRARIES", ())
    with (
        running(LAB_PYTHON, "tensors") as target,
        Reader(target.pid, execute=Execute.NEVER, cache=LayoutCache(tmp_path / "cache")) as reader,
    ):
        reader.set_root("holder", reader.find_local("serve", "holder"))
        results = reader.read(Group(["holder.counted", "len(holder.counted)"])).results
        assert plain(results["holder.counted"].value) == {"reference": "Tensor"}
        assert results["len(holder.counted)"].status is Status.OPAQUE
