from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sgdiag.model import SgdiagError
from sgdiag.session.attach import Access, _place
from sgdiag.session.doctor import examine
from sgdiag.session.target import FileTarget, PidTarget, UrlTarget, parse_target, port_here
from sgdiag.sources.proctree import find_servers
from tests.unit.procfs_tree import BASE, Tree


def test_targets_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "server.log"
    log.touch()
    monkeypatch.chdir(tmp_path)
    assert parse_target("4242") == PidTarget(4242)
    assert parse_target("http://gpu1:30000") == UrlTarget("http://gpu1:30000")
    assert parse_target("HTTP://gpu1:30000") == UrlTarget("HTTP://gpu1:30000")
    assert parse_target("gpu1:30000") == UrlTarget("http://gpu1:30000")
    assert parse_target("[::1]:30000") == UrlTarget("http://[::1]:30000")
    assert parse_target("server.log") == FileTarget(Path("server.log"))
    assert parse_target(str(log)) == FileTarget(log)


def test_a_file_whose_name_looks_like_an_address_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank:0").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_target("rank:0") == FileTarget(Path("rank:0"))


@pytest.mark.parametrize("text", ["statsu", "", "gpu1:99999", "no/such.log", ":30000", "٣"])
def test_what_is_no_target_is_said_in_one_line(text: str) -> None:
    with pytest.raises(SgdiagError, match="no command, no pid"):
        parse_target(text)


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(SgdiagError, match="is a folder"):
        parse_target(str(tmp_path))


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://127.0.0.1:30000", 30000),
        ("http://localhost:30001", 30001),
        ("https://127.0.0.5", 443),
        ("http://[::1]:8000", 8000),
        ("http://0.0.0.0:8000", 8000),
        ("http://[::]:8000", 8000),
        (f"http://{socket.gethostname()}:8000", 8000),
        ("http://203.0.113.7:30000", None),
        ("http://gpu1.example:30000", None),
        ("http://[x:30000", None),
    ],
)
def test_which_addresses_are_here(url: str, port: int | None) -> None:
    assert port_here(url) == port


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:31000"), ("gpu1.example", ""), ("203.0.113.7", ""), ("[x", "")],
)
def test_a_command_line_cannot_send_us_and_our_key_elsewhere(tmp_path: Path, host: str, url: str) -> None:
    """Any user of the host can write one."""
    tree = Tree(tmp_path)
    tree.server(argv=(*BASE, "--host", host))
    (server,) = find_servers(tree.proc)
    assert _place(server, Access()).url == url
    assert _place(server, Access(url="http://gpu1.example:31000")).url == "http://gpu1.example:31000"
    tree.add(os.getpid(), ("sgdiag",))
    http = next(row for row in examine("100", Access(), tree.proc)[0].rows if row.capability == "HTTP")
    assert ("is not known to be this host" in http.reason) == (not url)
