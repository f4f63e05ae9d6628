"""Model directories as they come: sharded, in the cache, broken, hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import SgdiagError
from sgdiag.sources.model_files import find_model, read_config, read_header, read_model
from tests.unit.made_models import CONFIG, write_model, write_tensors


def test_sharded_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    write_tensors(folder / "a.safetensors", {"lm_head.weight": ("BF16", [8, 4], 64)})
    write_tensors(folder / "b.safetensors", {"model.norm.weight": ("F32", [4], 16)})
    write_tensors(folder / "stray.safetensors", {"unused": ("F32", [1], 4)})
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = {one.name: one for one in read_model(folder).weights}
    assert set(found) == {"lm_head.weight", "model.norm.weight"}
    assert (found["lm_head.weight"].elements, found["lm_head.weight"].size_bytes) == (32, 64)
    assert found["model.norm.weight"].dims == 1


def test_a_directory_without_weights_still_has_its_configuration(tmp_path: Path) -> None:
    files = read_model(write_model(tmp_path))
    assert files.config == CONFIG
    assert not files.weights
    assert "no .safetensors files" in files.no_weights


def test_a_missing_shard_is_said(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert "gone.safetensors" in read_model(folder).no_weights


def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    write_tensors(tmp_path / "secret.safetensors", {"x": ("F32", [1], 4)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    assert "outside" in read_model(folder).no_weights


def test_quantisation_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    assert read_config(folder)["quantization_config"]["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_the_cache_by_its_main_revision_or_the_newest(tmp_path: Path) -> None:
    home = tmp_path / "models--owner--name"
    old, new = write_model(home / "snapshots" / "aa11"), write_model(home / "snapshots" / "bb22")
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("aa11\n")
    assert find_model("owner/name", environment) == old
    (home / "refs" / "main").write_text("../../elsewhere")
    assert find_model("owner/name", environment) in (old, new)
    assert find_model("owner/name", {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}) in (old, new)


@pytest.mark.parametrize("name", ["nobody/nothing", "/no/such/place", "x" * 5000, "a/b/c", "\0"])
def test_no_such_model_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(SgdiagError) as error:
        find_model(name, {"HF_HUB_CACHE": str(tmp_path)})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "no config.json"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 99999, "not JSON"),
    ],
)
def test_a_bad_configuration_is_one_line(tmp_path: Path, data: bytes | None, words: str) -> None:
    if data is not None:
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(SgdiagError, match=words):
        read_model(tmp_path)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader_of_headers(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("junk") / "x.safetensors"
    for body in (data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(body)
        with pytest.raises(SgdiagError, match="safetensors"):
            read_header(path)


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"shape": [-1], "data_offsets": [0, 4]},
        {"shape": [True], "data_offsets": [0, 4]},
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tmp_path: Path, entry: object) -> None:
    data = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(SgdiagError, match="no readable header"):
        read_header(path)


def test_a_pipe_among_the_weights_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert read_model(tmp_path).no_weights == "model.safetensors is not a file"
