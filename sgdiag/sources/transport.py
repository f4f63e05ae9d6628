"""One bounded HTTP GET at a time: total time, body size and destination are limited whatever the other side does."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, LocationParseError, NameResolutionError, NewConnectionError, ProtocolError
from urllib3.util import parse_url

from sgdiag.model import SourceError

DEFAULT_LIMIT_S = 3.0
FIRST_ANSWER_S = DEFAULT_LIMIT_S + 0.5
"""By then the first request to a server was answered or has failed; whoever asks earlier learns by chance which."""

DEFAULT_MAX_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_ABORT_S = 0.2
_TLS_RECORDS = ("\x15\x03", "\x16\x03")
_CLOSED_BEFORE_ANSWER = (ConnectionError, http.client.RemoteDisconnected, ProtocolError)


class UnreachableError(SourceError):
    """Nothing accepts connections there."""


class TimedOutError(SourceError):
    """The other side did not finish its answer in time."""


class Credentials(msgspec.Struct, frozen=True):
    """Keys as given to the server's ``--api-key`` and ``--admin-api-key``. Never shown, not even by ``repr``.

    All that sgdiag asks is open to the API key; the admin key serves where it is the only one that the user has.
    """

    api_key: str = ""
    admin_key: str = ""

    @property
    def bearer(self) -> str:
        return self.api_key or self.admin_key

    def __repr__(self) -> str:
        return f"Credentials({'***' if self.bearer else ''})"


class Answer(msgspec.Struct, frozen=True):
    """A complete HTTP answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Transport:
    """GET requests to one server over one kept connection, straight to it: no proxy, no redirect is followed.

    ``ca_file`` is a PEM file to trust in place of the system's certificates, ``insecure`` trusts any certificate.
    ``limit_s`` bounds a whole request from name resolution to the last byte. ``has_answered`` tells whether any was
    answered. Calls come from one thread at a time; ``close`` may come from another. Raises SourceError for a URL, key
    or file that cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        credentials: Credentials | None = None,
        *,
        ca_file: Path | None = None,
        insecure: bool = False,
        limit_s: float = DEFAULT_LIMIT_S,
    ) -> None:
        self.url, self._host, self._port, self._prefix, self._tls = _parse(base_url)
        self.limit_s = limit_s
        self.has_answered = False
        self._headers = _headers(credentials or Credentials())
        self.sends_key = "Authorization" in self._headers
        self._context = _tls_context(ca_file, insecure) if self._tls else None
        self._connection: HTTPConnection | None = None
        self._request: _Request | None = None

    def get(self, path: str, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Answer:
        """The answer to ``GET path``, whatever its status. Raises UnreachableError, TimedOutError, SourceError."""
        deadline = time.monotonic() + self.limit_s
        kept = self._connection is not None
        request = self._run(path, max_bytes, deadline)
        if kept and isinstance(request.error, _CLOSED_BEFORE_ANSWER):
            # A server closes a kept connection whenever it likes: that says nothing about this request.
            self._abort()
            request = self._run(path, max_bytes, deadline)
        if request.answer is None or request.answer.headers.get("connection", "").lower() == "close":
            self._abort()
        if request.answer is None:
            _explain(request.error, self.url, path, self._tls)
        self.has_answered = True
        return request.answer

    def close(self) -> None:
        self._abort()

    def _run(self, path: str, max_bytes: int, deadline: float) -> _Request:
        if self._request is not None and self._request.is_alive():
            # Name resolution and a TLS handshake cannot be interrupted; a second thread would be stuck as well.
            raise TimedOutError(f"an earlier request to {self.url} still hangs")
        if self._connection is None:
            self._connection = self._new_connection()
        request = self._request = _Request(self._connection, self._prefix + path, self._headers, max_bytes)
        # In a thread of its own, since no socket option bounds a server that sends one byte at a time.
        request.start()
        request.join(max(deadline - time.monotonic(), 0.0))
        if request.is_alive():
            self._abort()
            request.join(_ABORT_S)
            if not request.connected:
                raise TimedOutError(f"no connection to {self.url} within {self.limit_s:g} s")
            raise TimedOutError(f"{self.url}{path} has not answered completely within {self.limit_s:g} s")
        return request

    def _new_connection(self) -> HTTPConnection:
        # Not the limit of a request, only what ends a thread that cannot be woken.
        timeout = 2 * self.limit_s
        if self._context is None:
            return HTTPConnection(self._host, self._port, timeout=timeout)
        return HTTPSConnection(
            self._host,
            self._port,
            timeout=timeout,
            ssl_context=self._context,
            cert_reqs=self._context.verify_mode,
            assert_hostname=None if self._context.check_hostname else False,
        )

    def _abort(self) -> None:
        connection, self._connection = self._connection, None
        if self._request is not None:
            self._request.abort()
        if connection is not None:
            connection.close()


class _Request(threading.Thread):
    """One request over ``connection``; when it has ended there is an answer or an error."""

    def __init__(self, connection: HTTPConnection, path: str, headers: Mapping[str, str], max_bytes: int) -> None:
        super().__init__(name="http-get", daemon=True)
        self._connection, self._path, self._headers, self._max_bytes = connection, path, headers, max_bytes
        self._socket: socket.socket | None = None
        self.answer: Answer | None = None
        self.error: Exception | None = None

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def abort(self) -> None:
        """Wakes the thread where it waits for the next byte, which closing the connection would not."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            self.answer = self._ask()
        except Exception as error:  # carried over to the thread that asked
            self.error = error

    def _ask(self) -> Answer:
        if self._connection.sock is None:
            self._connection.connect()
        # Kept, since http.client lets go of the socket of an answer that ends with the connection.
        self._socket = self._connection.sock
        self._connection.request("GET", self._path, headers=self._headers, preload_content=False)
        response = self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.headers.items()}
        if headers.get("content-encoding", "identity") != "identity":
            raise SourceError(f"{self._path} is answered in an encoding that was not asked for")
        body = bytearray()
        while chunk := response.read(_CHUNK_BYTES, decode_content=False):
            body += chunk
            if len(body) > self._max_bytes:
                raise SourceError(f"the answer to {self._path} is longer than {self._max_bytes >> 20} MiB")
        return Answer(response.status, headers, bytes(body))


def _parse(base_url: str) -> tuple[str, str, int, str, bool]:
    text = base_url.strip()
    # What may be a password stays out of messages.
    shown = repr(text.rpartition("@")[2])
    remedy = "give it as http://HOST:PORT"
    try:
        parts = parse_url(text if "://" in text else f"http://{text}")
    except LocationParseError as error:
        raise SourceError(f"not a URL: {shown}", remedy) from error
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise SourceError(f"not the address of a server: {shown}", remedy)
    if parts.port == 0 or not _can_be_looked_up(parts.host):
        raise SourceError(f"not the address of a server: {shown}", remedy)
    if parts.auth:
        raise SourceError("the address holds a password", f"{remedy}, and the server's key as an option")
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    prefix = (parts.path or "").rstrip("/")
    return f"{parts.scheme}://{parts.host}:{port}{prefix}", parts.host.strip("[]"), port, prefix, tls


def _can_be_looked_up(host: str) -> bool:
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _headers(credentials: Credentials) -> Mapping[str, str]:
    # An encoded body could unpack to any size.
    headers = {"Accept-Encoding": "identity", "User-Agent": "sgdiag"}
    key = credentials.bearer
    if not key.isascii() or not key.isprintable():
        raise SourceError("the API key has characters that cannot be sent")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _tls_context(ca_file: Path | None, insecure: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    except OSError as error:
        raise SourceError(f"cannot use the certificates in {ca_file}: {error}") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _explain(error: Exception | None, url: str, path: str, tls: bool) -> NoReturn:
    if error is None or isinstance(error, SourceError):
        raise error or SourceError(f"no answer from {url}{path}")
    causes = _causes(error)
    if any(isinstance(cause, (NameResolutionError, socket.gaierror)) for cause in causes):
        raise UnreachableError(f"the host of {url} has no address here", "check the name") from error
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        raise UnreachableError(f"nothing listens on {url}") from error
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise SourceError(
                f"the certificate of {url} is not trusted: {cause.verify_message}",
                "name the file of the authority that signed it, or ask to trust any certificate",
            ) from error
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        raise SourceError(
            f"no TLS connection to {url}: {_last_words(error)}",
            "if the server was started without --ssl-certfile, use http:// in place of https://",
        ) from error
    if any(isinstance(cause, http.client.BadStatusLine) and str(cause).startswith(_TLS_RECORDS) for cause in causes):
        raise SourceError(f"{url} speaks TLS", "use https:// in place of http://") from error
    if any(isinstance(cause, http.client.RemoteDisconnected) for cause in causes):
        hint = "" if tls else "if it expects TLS, use https:// in place of http://"
        raise SourceError(f"{url} closes the connection without an answer", hint) from error
    if any(isinstance(cause, http.client.BadStatusLine) for cause in causes):
        raise SourceError(f"{url} does not speak HTTP") from error
    if any(isinstance(cause, (NewConnectionError, TimeoutError)) for cause in causes):
        raise UnreachableError(f"no connection to {url}: {_last_words(error)}") from error
    if isinstance(error, (HTTPError, http.client.HTTPException, OSError)):
        raise SourceError(f"{url}{path} breaks off its answer: {_last_words(error)}") from error
    raise SourceError(f"{url}{path}: unexpected {type(error).__name__}: {_last_words(error)}") from error


def _causes(error: BaseException) -> list[BaseException]:
    """The error and all that it stands for: causes, contexts and exceptions given as arguments."""
    found: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting and len(found) < 20:
        one = waiting.pop()
        if isinstance(one, BaseException) and one not in found:
            found.append(one)
            waiting += [one.__cause__, one.__context__, *one.args]
    return found


def _last_words(error: BaseException) -> str:
    """What the system said, where it said something, or else the library."""
    told = (cause.strerror for cause in _causes(error) if isinstance(cause, OSError) and cause.errno)
    words = next(filter(None, told), "") or str(error.args[-1] if error.args else error) or type(error).__name__
    return " ".join(words.split())[:200]
