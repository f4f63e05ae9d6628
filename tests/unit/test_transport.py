from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from sgdiag.model import SourceError
from sgdiag.sources.base import Asking
from sgdiag.sources.http import HttpSource
from sgdiag.sources.transport import Credentials, TimedOutError, Transport, UnreachableError
from tests.unit.misbehaving import (
    Behaviour,
    WebServer,
    is_silent,
    make_certificate,
    raw_server,
    says,
    trickles,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    try:
        return make_certificate(tmp_path_factory.mktemp("tls"))
    except FileNotFoundError:
        pytest.skip("no openssl command here")


def server_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def test_a_connection_is_kept() -> None:
    with WebServer({"/a": b"1", "/b": b"2"}) as server:
        transport = Transport(server.url)
        assert [transport.get(path).body for path in ("/a", "/b", "/a")] == [b"1", b"2", b"1"]
        assert len(server.connections) == 1
        transport.close()
        assert transport.get("/b").body == b"2"


def test_whether_a_server_has_answered_at_all() -> None:
    with raw_server(is_silent) as silent, WebServer({"/model_info": b"no JSON"}) as server:
        for url, answers in ((silent, False), (server.url, True)):
            source = HttpSource(Transport(url, limit_s=0.3))
            assert isinstance(source, Asking)
            assert not source.has_answered
            with pytest.raises(SourceError):
                source.read()
            assert source.has_answered is answers
            source.close()


def test_a_kept_connection_that_the_server_has_closed_is_replaced() -> None:
    with raw_server(says(OK)) as url:
        transport = Transport(url)
        assert [transport.get("/").body for _ in range(3)] == [b"hi"] * 3


@pytest.mark.parametrize(
    "behave",
    [
        is_silent,
        trickles(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"x", 0.05),
        trickles(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n", 0.05),
        trickles(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x", 0.05),
        trickles(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
        trickles(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 0.05),
        trickles(b"HTTP/1.1 200 OK\r\n\r\n", b"x", 0.05),
    ],
    ids=["silent", "body", "headers", "header", "continue", "chunks", "until close"],
)
def test_the_whole_request_is_limited_in_time(behave: Behaviour) -> None:
    with raw_server(behave) as url:
        transport = Transport(url, limit_s=0.4)
        for _ in range(2):
            begun = time.monotonic()
            with pytest.raises(TimedOutError, match=r"within 0\.4 s"):
                transport.get("/")
            assert time.monotonic() - begun < 1.0


def test_a_request_works_again_after_one_that_timed_out() -> None:
    with WebServer({"/slow": b"late", "/fast": b"ok"}) as server:
        server.slow_s["/slow"] = 1.0
        transport = Transport(server.url, limit_s=0.3)
        with pytest.raises(TimedOutError):
            transport.get("/slow")
        assert transport.get("/fast").body == b"ok"


def test_size_is_limited_with_and_without_a_length() -> None:
    flood = trickles(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, 0.0)
    with WebServer({"/big": b"x" * 3_000_000}) as server, raw_server(flood) as endless:
        for url, path in ((server.url, "/big"), (endless, "/")):
            with pytest.raises(SourceError, match="longer than 1 MiB"):
                Transport(url).get(path, max_bytes=1 << 20)


def test_an_encoded_body_is_refused() -> None:
    pages = {"/": (200, {"Content-Encoding": "gzip"}, b"\x1f\x8b")}
    with WebServer(pages) as server, pytest.raises(SourceError, match="not asked for"):
        Transport(server.url).get("/")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closes the connection without an answer"),
        (b"+PONG\r\n", "does not speak HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "speaks TLS"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ncut", "breaks off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "breaks off"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200, "breaks off"),
    ],
)
def test_one_clear_line_for_each_kind_of_nonsense(answer: bytes, message: str) -> None:
    with raw_server(says(answer)) as url, pytest.raises(SourceError, match=message) as caught:
        Transport(url).get("/")
    assert "\n" not in str(caught.value)


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"nothing listens on http://127.0.0.1:{port}"):
        Transport(f"http://127.0.0.1:{port}").get("/")


def test_a_host_without_an_address() -> None:
    with pytest.raises((UnreachableError, TimedOutError)):
        Transport("http://no-such-host.invalid:1").get("/")


def test_redirects_are_answers_and_are_not_followed() -> None:
    with WebServer({"/": (302, {"Location": "http://192.0.2.1/"}, b"")}) as server:
        assert Transport(server.url).get("/").status == 302
        assert server.asked == ["/"]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with WebServer({"/": b"direct"}) as server:
        assert Transport(server.url).get("/").body == b"direct"


def test_the_key_is_sent_and_never_shown() -> None:
    credentials = Credentials(api_key="s3cret")
    with WebServer({"/": b"in"}, key="s3cret") as server:
        assert Transport(server.url).get("/").status == 401
        assert Transport(server.url, credentials).get("/").status == 200
        assert Transport(server.url, Credentials(admin_key="s3cret")).get("/").status == 200
    assert "s3cret" not in repr(credentials)


@pytest.mark.parametrize("key", ["a\r\nX-Evil: 1", "ключ", "a\x00b"])
def test_a_key_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(SourceError, match="cannot be sent"):
        Transport("http://127.0.0.1:1", Credentials(api_key=key))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://Host:1/prefix/", "http://host:1/prefix"),
        ("https://[::1]", "https://[::1]:443"),
        (" http://h ", "http://h:80"),
        ("HTTP://h:1", "http://h:1"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert Transport(given).url == url


@pytest.mark.parametrize(
    "given",
    [
        "",
        "http://",
        "ftp://h",
        "http://h:99999",
        "http://u:p@h:1",
        "ftp://u:p@h",
        "http://u:p@h:99999",
        "http://h?x=1",
        "http://[::",
        "http://h:0",
        "http://.:1",
        "http://a..b:1",
        f"http://{'a' * 64}:1",
    ],
)
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(SourceError) as caught:
        Transport(given)
    assert "u:p" not in str(caught.value)


def test_tls_needs_a_trusted_certificate(certificate: tuple[Path, Path]) -> None:
    with WebServer({"/": b"safe"}, tls=server_context(certificate)) as server:
        with pytest.raises(SourceError, match="not trusted"):
            Transport(server.url).get("/")
        assert Transport(server.url, ca_file=certificate[0]).get("/").body == b"safe"
        assert Transport(server.url, insecure=True).get("/").body == b"safe"
        by_another_name = server.url.replace("127.0.0.1", "localhost")
        with pytest.raises(SourceError, match="not trusted"):
            Transport(by_another_name, ca_file=certificate[0]).get("/")


def test_plain_to_tls_and_tls_to_plain(certificate: tuple[Path, Path]) -> None:
    tls = server_context(certificate)
    with WebServer({"/": b""}, tls=tls) as server, pytest.raises(SourceError, match="https://"):
        Transport(server.url.replace("https", "http")).get("/")
    with WebServer({"/": b""}) as server, pytest.raises(SourceError, match="use http://"):
        Transport(server.url.replace("http", "https")).get("/")


def test_a_silent_tls_handshake_is_limited_too() -> None:
    with raw_server(is_silent) as url:
        transport = Transport(url.replace("http", "https"), limit_s=0.3)
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(SourceError):
                transport.get("/")
        assert time.monotonic() - begun < 2.0


def test_a_file_that_holds_no_certificates(tmp_path: Path) -> None:
    bad = tmp_path / "ca.pem"
    bad.write_text("nonsense")
    for path in (bad, tmp_path / "missing.pem"):
        with pytest.raises(SourceError, match="cannot use the certificates"):
            Transport("https://127.0.0.1:1", ca_file=path)


def test_closing_from_another_thread_ends_a_request() -> None:
    with raw_server(is_silent) as url:
        transport = Transport(url, limit_s=5.0)
        timer = threading.Timer(0.2, transport.close)
        timer.start()
        begun = time.monotonic()
        with contextlib.suppress(SourceError):
            transport.get("/")
        assert time.monotonic() - begun < 2.0
