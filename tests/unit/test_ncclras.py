"""NCCL's RAS: both forms of its answer, the exchange over a socket, and what is made of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import (
    Collectives,
    Finding,
    Known,
    NcclCommunicator,
    NcclRank,
    NcclRas,
    Process,
    Snapshot,
    SourceError,
    Unknown,
)
from sgdiag.releases.nccl import ras as form
from sgdiag.rules import evaluate
from sgdiag.sources import ncclras
from sgdiag.sources.ncclras import NcclRasSource, query

HEAD = (
    "NCCL version 2.27.7 compiled with CUDA 12.8\nCUDA runtime version 12080, driver version 13000\n\n"
    "Job summary\n===========\n\n"
)
TABLE = (
    "Communicators... (0.00s)\n=============\n\n"
    "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
    "    #  in group  per comm  per node  per comm  in group\n"
)


def row(group: int, communicators: int, ranks: int, status: str = "RUNNING", errors: str = "OK") -> str:
    return f"{group:5d}  {communicators:8d}  {1:8d}  {ranks:>8d}  {ranks:8d}  {ranks:8d}  {status:>8}  {errors:>6}\n"


def answer(*parts: str) -> str:
    return HEAD + TABLE + "".join(parts)


# --- text


def test_a_healthy_job_names_nobody() -> None:
    ras = form.parse(answer(row(0, 3, 8), "\nErrors\n======\n\nWarnings\n========\n\n"))
    assert (ras.version, ras.healthy_communicators, ras.communicators) == ("2.27.7", 3, ())


def test_ranks_behind_are_read_with_the_counts_of_all() -> None:
    ras = form.parse(
        answer(
            row(0, 1, 8, errors="MISMATCH"),
            "\nErrors\n======\n\nWarnings\n========\n\n#0-0 (27a079b828ff1a75) MISMATCH\n"
            "  Communicator ranks have different AllReduce operation counts\n"
            "  7 ranks have launched up to operation 6650\n"
            "  Rank 3 has launched up to operation 6649 -- GPU 3 managed by process 4103 on node 10.0.0.1\n\n"
            "  Communicator ranks have different Broadcast operation counts\n"
            "  6 ranks have launched up to operation 12\n"
            "  2 ranks have not launched any operations\n"
            "  Rank 5 -- GPU 5 (NVML 1) managed by process 4105 on node 10.0.0.1\n"
            "  Rank 6 -- [process information not found]\n\n",
        )
    )
    (item,) = ras.communicators
    assert (item.id, item.size_ranks) == ("0x27a079b828ff1a75", 8)
    assert item.most == {"AllReduce": 6650, "Broadcast": 12}
    ranks = {rank.rank: rank for rank in item.ranks}
    assert ranks[3] == NcclRank(rank=3, host="10.0.0.1", pid=4103, gpu=3, counts={"AllReduce": 6649})
    assert ranks[5].counts == {"Broadcast": 0}
    assert ranks[6].pid == -1


def test_the_first_release_does_not_name_operations() -> None:
    ras = form.parse(
        answer(
            row(0, 1, 32, errors="MISMATCH"),
            "#0-0 (1f) MISMATCH\n  Communicator ranks have different collective operation counts\n"
            "  26 ranks have launched up to operation 6650\n  6 ranks have launched up to operation 6649\n"
            "  Rank 0 -- GPU 0 managed by process 483072 on node 10.0.0.1\n",
        )
    )
    (item,) = ras.communicators
    assert item.most == {"collective": 6650}
    assert item.ranks[0].counts == {"collective": 6649}


def test_missing_ranks_are_silent_and_later_dead() -> None:
    process = "  Process 3487 on node 10.0.0.2 managing GPU 5\n\n"
    silent = f"INCOMPLETE\n  Missing communicator data from 1 job process\n{process}"
    dead = f"DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n{process}"
    begin = "#0-0 (cf26) INCOMPLETE\n  Missing communicator data from 1 rank\n"
    old = f"{begin}  The missing rank: 21\n\n"
    new = f"{begin}  Rank 21 -- GPU 5 managed by process 3487 on node 10.0.0.2\n\n"
    table = row(0, 1, 32, errors="INCOMPLETE") + "\nErrors\n======\n\n"
    for detail in (old, new):
        first, second = form.parse(answer(table, silent, detail)), form.parse(answer(table, dead, detail))
        assert (first.silent_pids, first.dead_pids) == ((3487,), ())
        assert [rank.state for rank in first.communicators[0].ranks] == ["unresponsive"]
        assert (second.silent_pids, second.dead_pids) == ((), (3487,))
        assert [rank.state for rank in second.communicators[0].ranks] == ["dead"]


@pytest.mark.parametrize("word", ["NOCOMM", "UNKNOWN"])
def test_ranks_that_left_are_absent(word: str) -> None:
    ras = form.parse(
        answer(
            row(0, 1, 8, "FINALIZE", "MISMATCH"),
            "#0-0 (9e17) MISMATCH\n  Communicator ranks have different status\n  6 ranks have status RUNNING\n"
            f"  Rank 4 has status {word} -- GPU 4 managed by process 9 on node n1\n"
            "  Rank 5 has status FINALIZE -- GPU 5 managed by process 10 on node n1\n",
        )
    )
    assert [(rank.rank, rank.state) for rank in ras.communicators[0].ranks] == [(4, "absent"), (5, "finalize")]


def test_errors_are_read_from_one_rank_and_from_several() -> None:
    ras = form.parse(
        answer(
            row(0, 1, 8, errors="ERROR"),
            "#0-0 (aa) ERROR\n  Asynchronous errors on 3 ranks\n  2 ranks reported Remote process error\n"
            "  Rank 1 -- GPU 1 managed by process 11 on node n1\n  Rank 2 -- GPU 2 managed by process 12 on node n1\n"
            "  Rank 0 reported System error -- GPU 0 managed by process 10 on node n1\n",
        )
    )
    found = {rank.rank: rank.error for rank in ras.communicators[0].ranks}
    assert found == {0: "system error", 1: "remote process error", 2: "remote process error"}


def test_timeouts_are_counted() -> None:
    ras = form.parse(
        answer(row(0, 1, 8), "TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n")
    )
    assert ras.timeouts == 2


# --- JSON


def as_json(**changes: Any) -> dict[str, Any]:
    here = {
        "rank": 0,
        "host": "10.0.0.1",
        "pid": 100,
        "cuda_dev": 0,
        "nvml_dev": 4,
        "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        },
        "collective_counts": {"Broadcast": 1, "AllReduce": 70},
    }
    missing = {
        "rank": 1,
        "host": "10.0.0.1",
        "pid": 101,
        "cuda_dev": 1,
        "nvml_dev": 5,
        "status": {"unresponsive": True, "considered_dead": False},
    }
    communicator = {
        "hash": "0xAE94",
        "secondary_hash": "0x1:0x2",
        "size": 2,
        "ranks_count": 1,
        "missing_ranks_count": 1,
        "ranks": [here],
        "missing_ranks": [missing],
    }
    return {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 13000,
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 1},
    } | changes


def test_json_lists_every_rank() -> None:
    ras = form.parse(json.dumps(as_json(), indent=2))
    (item,) = ras.communicators
    assert (ras.version, ras.timeouts, ras.silent_pids) == ("2.28.9", 1, (101,))
    assert item.id == "0xae94"
    assert item.most == {"Broadcast": 1, "AllReduce": 70}
    assert [(rank.rank, rank.state, rank.pid, rank.gpu) for rank in item.ranks] == [
        (0, "running", 100, 4),
        (1, "unresponsive", 101, 5),
    ]


@pytest.mark.parametrize("after", ['"nvml_dev": 5', '"pid": 101', '"host": "10.0.0.1"', '"unresponsive": true'])
def test_json_that_lacks_a_comma_in_a_missing_rank_is_mended(after: str) -> None:
    """2.28.9 forgets one; the position of the newline is as it prints them."""
    whole = json.dumps(as_json(), indent=2)
    begin = whole.index('"missing_ranks": [')
    broken = whole[:begin] + whole[begin:].replace(f"{after},", after, 1)
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)
    assert form.parse(broken) == form.parse(whole)


def test_missing_ranks_without_a_comma_between_them_are_mended() -> None:
    told = as_json()
    told["communicators"][0]["missing_ranks"].append(told["communicators"][0]["missing_ranks"][0] | {"rank": 2})
    whole = json.dumps(told, indent=2)
    begin = whole.index('"missing_ranks": [')
    tail = whole[begin:]
    cut = tail.index("},\n        {")
    broken = whole[:begin] + tail[:cut] + tail[cut:].replace("},", "}", 1)
    assert len(form.parse(broken).communicators[0].ranks) == 3


@pytest.mark.parametrize(
    ("status", "state", "error"),
    [
        ({"init_state": 7}, "init", ""),
        ({"abort_flag": True}, "abort", ""),
        ({"destroy_flag": True}, "finalize", ""),
        ({"async_error": 6}, "running", "remote process error"),
        ({"async_error": 99}, "running", "result 99"),
    ],
)
def test_states_of_ranks_that_answer(status: dict[str, Any], state: str, error: str) -> None:
    told = as_json()
    told["communicators"][0]["ranks"][0]["status"] |= status
    rank = form.parse(json.dumps(told)).communicators[0].ranks[0]
    assert (rank.state, rank.error) == (state, error)


@pytest.mark.parametrize(
    "text", ["", "HTTP/1.1 400 Bad Request\r\n\r\n", "{}", '{"communicators": 3}', "[" * 5000, "{" * 5000]
)
def test_what_is_no_answer_of_ras_is_refused(text: str) -> None:
    with pytest.raises(SourceError):
        form.parse(text)


pieces = st.sampled_from(
    [
        HEAD,
        TABLE,
        row(0, 1, 8),
        "#0-0 (aa) MISMATCH\n",
        "#1-99 (zz) ERROR\n",
        "  Communicator ranks have different AllReduce operation counts\n",
        "  7 ranks have launched up to operation 6650\n",
        "  Rank 3 -- GPU 3 managed by process 4103 on node n\n",
        "  The missing ranks: 1,2,3\n",
        "DEAD\n",
        json.dumps(as_json(), indent=2),
        '"a": 1\n "b": 2',
    ]
)


@given(st.lists(st.one_of(pieces, st.text(max_size=60)), max_size=12).map("".join))
def test_no_answer_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(SourceError):
        form.parse(text)


@given(st.integers(0, 10**4), st.integers(1, 30))
def test_no_cut_through_json_breaks_the_parser(begin: int, length: int) -> None:
    whole = json.dumps(as_json(), indent=2)
    begin %= len(whole)
    with contextlib.suppress(SourceError):
        form.parse(whole[:begin] + whole[begin + length :])


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}#0-0 (aa) ERROR\n  The missing ranks: {'1' * 200_000}\n",
        f"{HEAD}#0-0 (aa) ERROR\n{'1' * 200_000}\nRank 1 reported {'a' * 200_000}\n",
        HEAD + " 1" * 300_000,
        HEAD + "\n" * 200_000,
        "{" + "1\n" * 300_000,
        "{" + "}" * 100_000 + " " * 200_000,
    ],
)
def test_no_answer_takes_long(text: str) -> None:
    began = time.monotonic()
    with contextlib.suppress(SourceError):
        form.parse(text)
    assert time.monotonic() - began < 3


# --- where it listens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("localhost", 28028)),
        ("10.0.0.1:9000", ("10.0.0.1", 9000)),
        ("[::1]:9000", ("::1", 9000)),
        ("0.0.0.0:9000", ("127.0.0.1", 9000)),
        ("[::]:9000", ("::1", 9000)),
        ("host", ("host", 28028)),
    ],
)
def test_the_address_is_that_of_the_environment(text: str, expected: tuple[str, int]) -> None:
    assert form.address({"NCCL_RAS_ADDR": text}) == expected


@pytest.mark.parametrize("text", ["host:port", "host:0", "host:70000", "[::1]:x"])
def test_an_address_that_nccl_cannot_use_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="no address"):
        form.address({"NCCL_RAS_ADDR": text})


# --- the exchange


class Peer:
    """Something that listens; ``lines`` is what it was told."""

    def __init__(self, serve: Callable[[Peer, socket.socket], None]) -> None:
        self.lines: list[str] = []
        self._serve = serve
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._socket.accept()
                with line, contextlib.suppress(OSError):
                    self._serve(self, line)

    def close(self) -> None:
        self._socket.close()


def speaks_ras(status: str, *, knows_json: bool = True) -> Callable[[Peer, socket.socket], None]:
    def serve(peer: Peer, line: socket.socket) -> None:
        with line.makefile("r", newline="\n") as lines:
            for text in lines:
                peer.lines.append(text.rstrip("\n"))
                command = text.strip().lower()
                if command.startswith("client protocol "):
                    line.sendall(b"SERVER PROTOCOL 2\n")
                elif command.startswith("timeout ") or (command == "set format json" and knows_json):
                    line.sendall(b"OK\n")
                elif command.endswith("status"):
                    line.sendall(status.encode())
                    return
                else:
                    line.sendall(f"ERROR: Unknown command {text}".encode())

    return serve


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Peer, socket.socket], None]], Peer]]:
    peers: list[Peer] = []

    def make(serve: Callable[[Peer, socket.socket], None]) -> Peer:
        peers.append(Peer(serve))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_json_is_asked_for_and_only_what_reads_is_said(start: Any) -> None:
    peer = start(speaks_ras(json.dumps(as_json())))
    assert form.parse(query("127.0.0.1", peer.port)).version == "2.28.9"
    assert peer.lines == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"]


def test_an_older_release_answers_in_text(start: Any) -> None:
    peer = start(speaks_ras(answer(row(0, 2, 8)), knows_json=False))
    assert form.parse(query("127.0.0.1", peer.port)).healthy_communicators == 2
    assert peer.lines[-1] == "VERBOSE STATUS"


def test_what_is_not_ras_hears_nothing_but_the_greeting(start: Any) -> None:
    def web(peer: Peer, line: socket.socket) -> None:
        peer.lines.append(line.recv(4096).decode())
        line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        peer.lines.append(line.recv(4096).decode())

    peer = start(web)
    with pytest.raises(SourceError, match="not NCCL's RAS"):
        query("127.0.0.1", peer.port)
    time.sleep(0.05)
    assert peer.lines == ["CLIENT PROTOCOL 2\n", ""]


def test_who_never_answers_is_given_up(start: Any) -> None:
    def silent(_: Peer, line: socket.socket) -> None:
        line.recv(1 << 16)
        time.sleep(5)

    peer = start(silent)
    began = time.monotonic()
    with pytest.raises(SourceError, match="did not finish"):
        query("127.0.0.1", peer.port, limit_s=0.3)
    assert time.monotonic() - began < 2


def test_who_trickles_is_given_up(start: Any) -> None:
    def trickle(_: Peer, line: socket.socket) -> None:
        line.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
        for _number in range(200):
            line.sendall(b"x")
            time.sleep(0.02)

    peer = start(trickle)
    began = time.monotonic()
    with pytest.raises(SourceError, match="did not finish"):
        query("127.0.0.1", peer.port, limit_s=0.5)
    assert time.monotonic() - began < 2


def test_endless_answers_are_given_up(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncclras, "MAX_BYTES", 1 << 20)

    def flood(_: Peer, line: socket.socket) -> None:
        line.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
        while True:
            line.sendall(b"x" * 65536)

    def endless_line(_: Peer, line: socket.socket) -> None:
        while True:
            line.sendall(b"x" * 65536)

    with pytest.raises(SourceError, match="more than"):
        query("127.0.0.1", start(flood).port)
    with pytest.raises(SourceError, match="does not end"):
        query("127.0.0.1", start(endless_line).port)


def test_nobody_there_is_one_clear_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SourceError, match="refused"):
        query("127.0.0.1", port)


# --- the source


def source_at(port: int, clock: Callable[[], float] = time.monotonic) -> NcclRasSource:
    return NcclRasSource(lambda: [os.getpid()], lambda: {"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}, clock=clock)


def why_without(source: NcclRasSource) -> str:
    ras = source.read().collectives.ras
    assert isinstance(ras, Unknown)
    return ras.reason


def test_a_port_of_another_program_is_never_called(start: Any) -> None:
    peer = start(speaks_ras(json.dumps(as_json())))
    with subprocess.Popen(["sleep", "60"]) as other:
        source = NcclRasSource(lambda: [other.pid], lambda: {"NCCL_RAS_ADDR": f"127.0.0.1:{peer.port}"})
        try:
            assert "none of the server's processes listens" in why_without(source)
        finally:
            other.kill()
    assert peer.lines == []


def test_ras_that_is_switched_off_is_not_called() -> None:
    source = NcclRasSource(lambda: [os.getpid()], lambda: {"NCCL_RAS_ENABLE": "0"})
    assert "switched off" in why_without(source)


def test_the_source_knows_for_how_long_counts_stand_still(start: Any) -> None:
    told = as_json()
    clock = iter([100.0, 130.0, 140.0])

    def serve(peer: Peer, line: socket.socket) -> None:
        speaks_ras(json.dumps(told))(peer, line)

    source = source_at(start(serve).port, lambda: next(clock))

    def unchanged() -> list[float]:
        ras = source.read().collectives.ras
        assert isinstance(ras, Known)
        return [rank.unchanged_s for rank in ras.value.communicators[0].ranks]

    assert unchanged() == [0, 0]
    assert unchanged() == [30, 30]
    told["communicators"][0]["ranks"][0]["collective_counts"]["AllReduce"] += 1
    assert unchanged() == [0, 40]


# --- findings


def findings(
    *ranks: NcclRank, most: dict[str, int] | None = None, processes: tuple[Process, ...] = ()
) -> dict[str, Finding]:
    item = NcclCommunicator(id="0xa", size_ranks=8, ranks=ranks, most=most or {"AllReduce": 50})
    ras = Known(NcclRas(version="2.28.9", communicators=(item,)), "ncclras:localhost:28028")
    made = evaluate(Snapshot(collectives=Collectives(ras=ras), processes=processes))
    return {one.id: one for one in made if one.id.startswith("nccl-rank")}


@pytest.mark.parametrize(("still_s", "verdict"), [(0, None), (9, None), (12, "WARN"), (31, "FAIL")])
def test_a_rank_that_stays_behind_is_the_one_to_look_at(still_s: float, verdict: str | None) -> None:
    ranks = (
        NcclRank(rank=0, counts={"AllReduce": 50}, unchanged_s=still_s),
        NcclRank(rank=3, pid=4, gpu=3, counts={"AllReduce": 49}, unchanged_s=still_s),
    )
    found = findings(*ranks).get("nccl-rank-lagging")
    assert (found.verdict if found else None) == verdict
    if found:
        assert "rank 3" in found.title
        assert "AllReduce 49 of 50" in found.evidence[0].text


def test_equal_counts_and_one_sided_operations_are_no_lag() -> None:
    idle = (NcclRank(rank=0, counts={"AllReduce": 50, "Send": 1}, unchanged_s=900),)
    assert findings(*idle, most={"AllReduce": 50, "Send": 9}) == {}


@pytest.mark.parametrize(
    ("state", "verdict", "sure"),
    [("dead", "FAIL", True), ("unresponsive", "FAIL", True), ("absent", "WARN", False), ("running", None, False)],
)
def test_ranks_that_do_not_answer_are_missing(state: Any, verdict: str | None, sure: bool) -> None:
    found = findings(NcclRank(rank=5, state=state, pid=77)).get("nccl-rank-missing")
    assert (found.verdict if found else None) == verdict
    if found:
        assert (found.confidence >= 0.8) == sure


def test_ranks_of_another_job_are_not_ours() -> None:
    rank = NcclRank(rank=5, state="dead", pid=77)
    assert findings(rank, processes=(Process(pid=78),)) == {}
    assert findings(rank, processes=(Process(pid=78, inner_pid=Known(77, "procfs")),)) != {}


def test_an_environment_cannot_send_us_to_another_host() -> None:
    """Any user of the host can set one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {"NCCL_RAS_ADDR": f"gpu1.example:{listener.getsockname()[1]}"}
        told = NcclRasSource(lambda: [os.getpid()], lambda: variables).read().collectives.ras
    assert isinstance(told, Unknown) and "gpu1.example, which is not known to be this host" in told.reason
