"""Loopback servers that answer as told, byte for byte, for the tests of what talks to a network."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Behaviour = Callable[[socket.socket], None]


@contextlib.contextmanager
def raw_server(behave: Behaviour) -> Iterator[str]:
    """Calls ``behave`` with each accepted connection; yields the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            behave(connection)
        with contextlib.suppress(OSError):
            connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_sockets.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for one in (listener, *open_sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def says(answer: bytes) -> Behaviour:
    """Reads a request and sends ``answer``, then closes."""

    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    return behave


def trickles(head: bytes, drop: bytes, every_s: float) -> Behaviour:
    """Sends ``head``, then ``drop`` again and again."""

    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(head)
        while True:
            connection.sendall(drop)
            time.sleep(every_s)

    return behave


def is_silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


Page = tuple[int, Mapping[str, str], bytes]


class WebServer:
    """An HTTP/1.1 server of fixed pages; what is no page is 404. Records what it was asked."""

    def __init__(self, pages: Mapping[str, Any], *, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.pages: dict[str, Any] = dict(pages)
        self.asked: list[str] = []
        self.authorization: list[str] = []
        self.connections: list[socket.socket] = []
        self.slow_s: dict[str, float] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            server_version, sys_version = "uvicorn", ""

            def setup(self) -> None:
                super().setup()
                outer.connections.append(self.connection)

            def version_string(self) -> str:
                return "uvicorn"

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.authorization.append(self.headers.get("Authorization", ""))
                time.sleep(outer.slow_s.get(self.path, 0.0))
                status, headers, body = outer.page(self.path, key, self.headers.get("Authorization", ""))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients that hang up are the point

        self.server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server.server_address[1]}"

    def page(self, path: str, key: str, authorization: str) -> Page:
        if key and authorization != f"Bearer {key}":
            return 401, {}, b'{"error":"Unauthorized"}'
        page = self.pages.get(path, (404, {}, b'{"detail":"Not Found"}'))
        if isinstance(page, bytes):
            return 200, {}, page
        if isinstance(page, dict):
            return 200, {"Content-Type": "application/json"}, json.dumps(page).encode()
        status, headers, body = page
        return status, headers, body

    def __enter__(self) -> WebServer:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=sgdiag"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *options.split(), *names, *files], check=True, capture_output=True)
    return certificate, key
