from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Known, RankId, SourceError, Unknown
from sgdiag.releases import loadshm as form
from sgdiag.sources.loads import Layout, load
from sgdiag.sources.loadshm import LoadShmSource, find_load_files, read_entries
from sgdiag.sources.procfs import ProcFs

HEADER_BYTES, SLOT_BYTES = 12, 16 * 1024
BASE = {"timestamp": 1000.5, "num_running_reqs": 3, "num_used_tokens": 700, "max_total_num_tokens": 20000}
NESTED = {**BASE, "memory": [1.5, 0.25, 0.125, 20000], "speculative": [2.9, 0.61], "queues": [0, 0, 0, 2, 0]}
FLAT = {
    **BASE,
    "has_memory": 1,
    "memory_weight_gb": 1.5,
    "memory_kv_cache_gb": 0.25,
    "memory_graph_gb": 0.125,
    "has_speculative": 1,
    "speculative_accept_length": 2.9,
    "speculative_accept_rate": 0.61,
    "has_queues": 1,
    "queue_retracted": 2,
}


def file_of(*payloads: Any, magic: bytes = b"SLNS", version: int = 2, workers: int | None = None) -> bytes:
    encoded = [payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload) for payload in payloads]
    slots = [(struct.pack("<I", len(one)) + one).ljust(SLOT_BYTES, b"\0") for one in encoded]
    return struct.pack("<4sHHI", magic, version, len(slots) if workers is None else workers, SLOT_BYTES) + b"".join(
        slots
    )


class FakeServer:
    """A proc file system in which process 7 holds a load file open, as a link in its ``fd`` folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = ProcFs(folder / "proc")
        self.file = folder / "dev" / "shm" / "sglang_loads_abc_1.shm"
        self.link = folder / "proc" / "7" / "fd" / "52"
        self.file.parent.mkdir(parents=True)
        self.link.parent.mkdir(parents=True)

    def publish(self, data: bytes) -> None:
        self.file.write_bytes(data)


@pytest.fixture
def entries(tmp_path: Path) -> Any:
    def read(data: bytes) -> list[dict[str, Any]]:
        (tmp_path / "file").write_bytes(data)
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            return read_entries(descriptor, patience_s=0.01)
        finally:
            os.close(descriptor)

    return read


@pytest.mark.parametrize("payload", [NESTED, FLAT], ids=["0.5.18+", "0.5.13, 0.5.15"])
def test_both_forms_say_the_same(entries: Any, payload: dict[str, Any]) -> None:
    (entry,) = entries(file_of(payload))
    assert entry["timestamp"] == 1000.5
    assert entry["memory"]["weight_gb"] == 1.5
    assert entry["speculative"] == {"accept_length": 2.9, "accept_rate": 0.61}
    assert entry["queues"]["retracted"] == 2
    assert entry["num_waiting_reqs"] == 0


def test_no_section_is_no_section(entries: Any) -> None:
    (entry,) = entries(file_of({**BASE, "has_speculative": 0, "memory": None}))
    assert "speculative" not in entry
    assert "memory" not in entry


def test_longer_sections_of_newer_releases_are_read_as_far_as_known(entries: Any) -> None:
    (entry,) = entries(file_of({**BASE, "speculative": [2.0, 0.5, "new", 4]}))
    assert entry["speculative"] == {"accept_length": 2.0, "accept_rate": 0.5}


def test_the_slot_names_the_worker_whatever_the_payload_says(entries: Any) -> None:
    found = entries(file_of({**BASE, "dp_rank": 5}, {"dp_rank": 1}, {**BASE, "dp_rank": 0}))
    assert [entry["dp_rank"] for entry in found] == [0, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no SGLang header"),
        (b"SLNS", "no SGLang header"),
        (file_of(NESTED, magic=b"ELF!"), "no SGLang header"),
        (file_of(NESTED, version=3), "version 3, not 2"),
        (file_of(NESTED, workers=0), "makes no sense"),
        (file_of(NESTED, workers=60000), "makes no sense"),
        (file_of(NESTED, workers=9), "too short for the 9 workers"),
        (file_of(NESTED)[:-1], "too short"),
        (struct.pack("<4sHHI", b"SLNS", 2, 1, 2**31), "makes no sense"),
        (struct.pack("<4sHHI", b"SLNS", 2, 1, 0), "makes no sense"),
        (file_of(b""), "half-written"),
        (file_of(b"\xc1\xc1"), "half-written"),
        (file_of(b"\x93\x01\x02\x03"), "half-written"),
        (file_of(b"\x91" * 5000), "half-written"),
        (file_of(NESTED)[:HEADER_BYTES] + struct.pack("<I", 2**31) + b"\0" * SLOT_BYTES, "half-written"),
    ],
)
def test_other_files_are_refused(entries: Any, data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        entries(data)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200), st.booleans())
def test_any_payload_is_read_or_refused(payload: bytes, framed: bool) -> None:
    descriptor = os.memfd_create("load")
    try:
        os.write(descriptor, file_of(payload) if framed else payload)
        read_entries(descriptor, patience_s=0.001)
    except SourceError:
        pass
    finally:
        os.close(descriptor)


msgpack_values = (
    st.none() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=5) | st.lists(st.floats(), max_size=6)
)


@given(st.dictionaries(st.sampled_from([*FLAT, *NESTED]), msgpack_values))
def test_any_values_become_facts_or_reasons(payload: dict[str, Any]) -> None:
    descriptor = os.memfd_create("load")
    try:
        os.write(descriptor, file_of({"timestamp": 1.0, **payload}))
        for entry in read_entries(descriptor):
            rank = load(entry, "shm", entry["timestamp"], Layout()).rank
            for fact in (rank.running_requests, rank.kv.used_tokens, rank.memory.weights_bytes, rank.accept_ratio):
                assert isinstance(fact, Unknown) or 0 <= fact.value < float("inf")
    finally:
        os.close(descriptor)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer(tmp_path)
    monkeypatch.setattr(form, "FILE_NAME", re.compile(re.escape(str(fake.file))))
    fake.link.symlink_to(fake.file)
    return fake


def test_facts_carry_the_schedulers_own_time(server: FakeServer) -> None:
    server.publish(file_of(NESTED, {**NESTED, "timestamp": 900.25, "num_running_reqs": 8}))
    source = LoadShmSource(lambda: [6, 7], Layout(tp_size=4, dp_size=2, dp_attention=True), proc=server.proc)
    snapshot = source.read()
    source.close()
    assert [rank.id for rank in snapshot.ranks] == [RankId(), RankId(dp=1, tp=2)]
    assert snapshot.ranks[0].running_requests == Known(3, "shm:num_running_reqs", at=1000.5)
    assert snapshot.ranks[1].running_requests == Known(8, "shm:num_running_reqs", at=900.25)
    assert snapshot.ranks[0].memory.weights_bytes.value == 3 << 29
    assert snapshot.speculation.accept_length_since_start_tokens.value == 2.9


def test_nothing_published_yet(server: FakeServer) -> None:
    server.publish(file_of({}))
    with pytest.raises(SourceError, match="not published a load yet"):
        LoadShmSource(lambda: [7], proc=server.proc).read()


def test_a_new_server_file_is_found_when_the_old_one_is_gone(server: FakeServer) -> None:
    server.publish(file_of(NESTED))
    source = LoadShmSource(lambda: [7], proc=server.proc)
    source.read()
    server.link.unlink()
    with pytest.raises(SourceError, match="has a load file open"):
        source.read()
    server.publish(file_of({**NESTED, "num_running_reqs": 1}))
    server.link.with_name("60").symlink_to(server.file)
    assert source.read().ranks[0].running_requests.value == 1
    source.close()


def test_other_open_files_and_processes_that_are_gone_are_passed_over(server: FakeServer) -> None:
    server.publish(file_of(NESTED))
    server.link.with_name("3").symlink_to("socket:[123]")
    server.link.with_name("4").symlink_to("/dev/shm/sglang_other.shm")
    (found,) = find_load_files([5, 7], server.proc)
    assert (found.pid, found.path) == (7, server.link)


def test_processes_of_somebody_else_are_an_error(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> Iterator[Path]:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(SourceError, match="may not be looked into"):
        find_load_files([7], server.proc)


def test_a_file_that_may_not_be_read_is_an_error(server: FakeServer) -> None:
    with pytest.raises(SourceError, match="cannot read"):
        LoadShmSource(lambda: [7], proc=server.proc).read()


def test_only_what_reads_the_same_twice_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def slot(running: int) -> bytes:
        payload = msgspec.msgpack.encode({"timestamp": 1.0, "num_running_reqs": running})
        return struct.pack("<I", len(payload)) + payload

    header = struct.pack("<4sHHI", b"SLNS", 2, 1, SLOT_BYTES)
    half, whole = slot(1), slot(2)
    reads = iter([header, half[:4], half, whole, whole[:4], whole, whole])
    descriptor = os.memfd_create("load")
    os.write(descriptor, file_of(NESTED))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: next(reads))
        (entry,) = read_entries(descriptor)
    os.close(descriptor)
    assert entry["num_running_reqs"] == 2


WRITER = """
import msgspec, os, struct, sys
descriptor, number = int(sys.argv[1]), 0
while os.getppid() == int(sys.argv[2]):
    number += 1
    digits = str(number) * (1 + number % 200)
    entry = {"timestamp": 1.0 + number, "num_running_reqs": number, "check": [number, digits]}
    data = msgspec.msgpack.encode(entry)
    half = len(data) // 2
    os.pwrite(descriptor, struct.pack("<I", 0), 12)
    os.pwrite(descriptor, data[:half], 16)
    os.pwrite(descriptor, data[half:], 16 + half)
    os.pwrite(descriptor, struct.pack("<I", len(data)), 12)
    for _ in range(2000):
        pass
"""
"""Writes as SGLang does, but with almost no time between two writes."""


def test_a_writer_at_full_speed_is_never_read_half() -> None:
    descriptor = os.memfd_create("load")
    os.write(descriptor, file_of({"timestamp": 1.0, "num_running_reqs": 0, "check": [0, "0"]}))
    command = [sys.executable, "-c", WRITER, str(descriptor), str(os.getpid())]
    seen: set[int] = set()
    writer = subprocess.Popen(command, pass_fds=[descriptor])
    try:
        deadline = time.monotonic() + 10
        while len(seen) < 100 and time.monotonic() < deadline:
            (entry,) = read_entries(descriptor)
            number = entry["num_running_reqs"]
            assert entry["check"] == [number, str(number) * (1 + number % 200)]
            assert entry["timestamp"] == 1.0 + number
            seen.add(number)
    finally:
        writer.kill()
        writer.wait()
        os.close(descriptor)
    assert len(seen) == 100
