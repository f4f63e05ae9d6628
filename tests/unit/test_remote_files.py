"""ELF files and the cache of layouts: files that others may have made."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgdiag.remote import LayoutCache
from sgdiag.remote.elf import ElfError, ElfFile

KEY = "python-3.11-abc"


def opened(path: Path) -> ElfFile:
    return ElfFile(os.open(path, os.O_RDONLY))


def test_symbols_and_build_id_of_a_real_file() -> None:
    program = Path(sys.executable).resolve()
    library = next(Path(program).parent.parent.glob("lib/libpython3.*.so.1.0"), program)
    with opened(library) as elf:
        assert len(elf.build_id()) >= 16
        runtime = elf.symbol("_PyRuntime")
        assert runtime is not None
        assert 0 < runtime < library.stat().st_size * 2
        assert elf.symbol("Py_") is None
        assert elf.symbol("_Py_no_such_symbol") is None


ELF_START = Path("/bin/true").resolve().read_bytes()


@given(
    damage=st.lists(st.tuples(st.integers(0, len(ELF_START) - 1), st.integers(0, 255)), max_size=60), cut=st.booleans()
)
# The place of the program headers, and of the first segment that is loaded, beyond what a file can have.
@example(damage=[(39, 128)], cut=False)
@example(damage=[(191, 128)], cut=False)
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]], cut: bool
) -> None:
    content = bytearray(ELF_START)
    for at, value in damage:
        content[at % (800 if cut else len(content))] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content[: 900 if cut else len(content)])
    try:
        with opened(path) as elf:
            elf.build_id()
            elf.symbol("_PyRuntime")
    except ElfError:
        return


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_elf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ElfError):
        opened(path)


def test_a_cache_gives_back_what_it_was_given(tmp_path: Path) -> None:
    cache = LayoutCache(tmp_path / "a" / "b")
    assert cache.load(KEY) is None
    assert cache.store(KEY, {"x": [1, 2]})
    assert cache.load(KEY) == {"x": [1, 2]}
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [f"{KEY}.json"]


def test_a_cache_does_not_believe_what_others_may_have_written(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    cache = LayoutCache(directory)
    cache.store(KEY, 1)
    file = directory / f"{KEY}.json"
    file.chmod(0o666)
    assert cache.load(KEY) is None
    file.chmod(0o600)
    assert cache.load(KEY) == 1
    directory.chmod(0o777)
    assert cache.load(KEY) is None
    assert not cache.store(KEY, 2)
    directory.chmod(0o700)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)
    assert cache.load(KEY) is None
    file.unlink()
    os.mkfifo(file)
    assert cache.load(KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_cache_does_not_believe_another_users_files(tmp_path: Path) -> None:
    cache = LayoutCache(tmp_path / "cache")
    cache.store(KEY, 1)
    file = tmp_path / "cache" / f"{KEY}.json"
    os.chown(file, 65534, 65534)
    assert cache.load(KEY) is None
    os.chown(file, 0, 0)
    os.chown(tmp_path / "cache", 65534, 65534)
    assert cache.load(KEY) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b" " * (2 << 20)])
def test_a_damaged_cache_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    cache = LayoutCache(tmp_path / "cache")
    cache.store(KEY, 1)
    (tmp_path / "cache" / f"{KEY}.json").write_bytes(content)
    assert cache.load(KEY) is None


def test_keys_cannot_leave_the_directory(tmp_path: Path) -> None:
    for key in ("../x", "a/b", "", "a\0b"):
        with pytest.raises(ValueError, match="is no key"):
            LayoutCache(tmp_path).load(key)


def test_a_cache_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not LayoutCache(tmp_path / "file" / "cache").store(KEY, 1)
    assert LayoutCache(tmp_path / "file" / "cache").load(KEY) is None
