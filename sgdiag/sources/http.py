"""A server's own HTTP endpoints, those that cost it nothing or little."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import msgspec

from sgdiag.model import (
    NOT_ASKED,
    Fact,
    Health,
    Known,
    KvPool,
    Rank,
    RankId,
    Server,
    Snapshot,
    SourceError,
    Speculation,
    Unknown,
    unknown,
)
from sgdiag.releases.endpoints import Rule, oldest_possible, rule
from sgdiag.sources.fields import Fields, lay_over, shorten
from sgdiag.sources.loads import Layout, Load, load
from sgdiag.sources.server_info import SERVER_FROM_ARGUMENTS, ServerInfo
from sgdiag.sources.transport import Answer, TimedOutError, Transport, UnreachableError

RARELY_S = 30.0
SCHEDULER_SILENT_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
_AFTER_FAILURE_S = 300.0
_MAX_RANKS = 1024


class HttpSource:
    """Facts from ``/model_info``, ``/v1/loads``, ``/server_info`` and ``/ready``.

    Which of them is asked, and how often, is decided by ``sgdiag.releases.endpoints``; ``/health`` never is, since it
    makes an idle server generate. ``known_release`` is what another source knows of the release, if any; what the
    server says wins. ``layout`` serves where ``/server_info`` must not be asked. Each read leaves lines in
    the server's access log: ``least_period_s`` slows it down where the loads come from elsewhere, too.
    """

    name = "http"

    def __init__(
        self,
        transport: Transport,
        known_release: Fact[str] | None = None,
        *,
        layout: Layout | None = None,
        least_period_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._transport = transport
        self._least_period_s = least_period_s
        self._forget()
        self._release: Fact[str] = known_release or NOT_ASKED
        self._is_sglang = isinstance(known_release, Known)
        self._given_layout = layout or Layout()
        self._clock = clock

    def _forget(self) -> None:
        """The server is gone; another may come in its place, and of another release."""
        self._release = NOT_ASKED
        self._model: _Kept | None = None
        self._info: ServerInfo | None = None
        self._ready: _Kept | None = None
        self._failed: dict[str, _Failed] = {}
        self._scheduler = _Patience()

    @property
    def period_s(self) -> float:
        return max(self._least_period_s, 1.0 if self._rule("/v1/loads").ask == "freely" else 2.0)

    @property
    def timeout_s(self) -> float:
        """Four requests at most in one read."""
        return 4 * self._transport.limit_s + 1.0

    @property
    def has_answered(self) -> bool:
        return self._transport.has_answered

    def close(self) -> None:
        self._transport.close()

    def read(self) -> Snapshot:
        """Raises SourceError for what is not an SGLang server and, until it was one once, for silence."""
        now = self._clock()
        try:
            snapshot = self._read(now)
        except UnreachableError as error:
            snapshot = self._without_answer("down", error, now)
            self._forget()
        except TimedOutError as error:
            snapshot = self._without_answer("unresponsive", error, now)
        self._is_sglang = True
        return snapshot

    def _read(self, now: float) -> Snapshot:
        # Something is asked each time, or a server that hangs would go unnoticed.
        if self._model is None or self._model.age(now) > RARELY_S or self._why_not("/v1/loads", now):
            answer = self._transport.get("/model_info")
            self._check_is_sglang(answer)
            self._model = _Kept(self._decode("/model_info", answer), now)
        loads, no_loads = self._ask("/v1/loads", now)
        self._note_release(loads, "loads")
        no_info = self._refresh_info(now)
        ready = self._refresh_ready(now)
        info = self._info
        entries = entries_of(loads, now, info.layout if info else self._given_layout, info.speculates if info else None)
        server = msgspec.structs.replace(self._server(no_info), health=self._health(ready, entries, now))
        silence = unknown(no_loads or "the server tells no load")
        since_start = entries[0].accept_length_since_start_tokens if entries else silence
        speculation = Speculation(accept_length_since_start_tokens=since_start)
        ranks = {entry.rank.id: entry.rank for entry in entries}
        if info is None:
            return Snapshot(server=server, ranks=tuple(ranks.values()), speculation=speculation)
        return Snapshot(
            server=server,
            ranks=_joined(ranks, info.ranks, silence),
            speculation=lay_over(speculation, info.speculation),
            graphs=info.graphs,
        )

    # What is asked, and what is not.

    def _rule(self, path: str) -> Rule:
        return rule(path, self._release.or_else("") or oldest_possible(self._model.data if self._model else {}))

    def _needs_scheduler(self, path: str) -> bool:
        return self._rule(path).ask != "freely"

    def _why_not(self, path: str, now: float) -> str:
        """Why ``path`` is better not asked now; empty if it may be."""
        failed = self._failed.get(path)
        if failed is not None and now < failed.until:
            return failed.reason
        return "the scheduler does not answer" if self._needs_scheduler(path) and self._scheduler.must_wait(now) else ""

    def _ask(self, path: str, now: float) -> tuple[Mapping[str, Any], str]:
        """What ``path`` answers; empty, and why, where it fails or the scheduler, needed for it, is silent."""
        if reason := self._why_not(path, now):
            return {}, reason
        try:
            data = self._decode(path, self._transport.get(path))
        except TimedOutError as error:
            if not self._needs_scheduler(path):
                raise
            self._scheduler.did_not_answer(now)
            return {}, str(error)
        except UnreachableError:
            raise
        except SourceError as error:
            # Each failure may leave a traceback in the server's log.
            self._failed[path] = _Failed(str(error), now + _AFTER_FAILURE_S)
            return {}, str(error)
        if self._needs_scheduler(path):
            self._scheduler.answered()
        return data, ""

    def _refresh_info(self, now: float) -> str:
        """Asks for the server arguments where it is time and harmless; why there are none, if there are none."""
        policy = self._rule("/server_info")
        if policy.ask == "never":
            self._info = None
            return f"/server_info is not asked: {policy.why}"
        if self._info is not None and now - self._info.at <= RARELY_S:
            return ""
        data, silence = self._ask("/server_info", now)
        if data:
            self._info = ServerInfo(data, now)
            self._note_release(data, "server_info")
        return silence

    def _refresh_ready(self, now: float) -> bool | None:
        """The server's own word on whether it takes requests; None where it has none."""
        if self._rule("/ready").ask == "never":
            return None
        if self._ready is None or self._ready.age(now) > RARELY_S or not self._ready.data["ready"]:
            status = self._transport.get("/ready").status
            if status not in (200, 503):
                return None
            self._ready = _Kept({"ready": status == 200}, now)
        return bool(self._ready.data["ready"])

    def _note_release(self, data: Mapping[str, Any], place: str) -> None:
        said = Fields(data, place, 0.0).text("version")
        if isinstance(said, Known) and said.value != self._release.or_else(""):
            self._release = said

    # Who answers, and how.

    def _check_is_sglang(self, answer: Answer) -> None:
        url = self._transport.url
        if answer.status == 200 and b'"is_generation"' in answer.body and b'"model_path"' in answer.body:
            return
        if answer.status in (401, 403):
            self._refuse_key(answer.status)
        if answer.status in (502, 503, 504):
            raise UnreachableError(f"{url} is a proxy or gateway, and the server behind it does not answer")
        if 300 <= answer.status < 400:
            where = shorten(answer.headers.get("location", "another place"))
            raise SourceError(f"{url} redirects to {where}", "give the address of the SGLang server itself")
        raise SourceError(f"{self._who(answer)}, not SGLang", "give the address that the server was started with")

    def _who(self, answer: Answer) -> str:
        url = self._transport.url
        models = self._transport.get("/v1/models")
        owner = _owner(models.body) if models.status == 200 else ""
        if owner and owner != "sglang":
            return f"{url} is a server of {'vLLM' if owner == 'vllm' else shorten(owner)}"
        software = answer.headers.get("server", "")
        if software and software != "uvicorn":
            return f"{url} is {shorten(software)}"
        what = "a web page" if b"<html" in answer.body[:1000].lower() else f"status {answer.status}"
        return f"{url} answers /model_info with {what}"

    def _decode(self, path: str, answer: Answer) -> Mapping[str, Any]:
        if answer.status in (401, 403):
            self._refuse_key(answer.status)
        if answer.status == 404:
            raise SourceError(f"this server has no {path}")
        if answer.status != 200:
            raise SourceError(f"{self._transport.url}{path} answers with status {answer.status}")
        try:
            data = msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SourceError(f"{self._transport.url}{path} does not answer in JSON") from error
        if not isinstance(data, dict):
            raise SourceError(f"{self._transport.url}{path} answers with something else than a JSON object")
        return data

    def _refuse_key(self, status: int) -> NoReturn:
        what = "refuses this API key" if self._transport.sends_key else "wants an API key"
        raise SourceError(f"the server {what}: status {status}", "give the key that it was started with (--api-key)")

    # What it means.

    def _health(self, ready: bool | None, entries: list[Load], now: float) -> Known[Health]:
        ages = [now - entry.at for entry in entries if entry.at < now]
        # Before 0.5.18 loads have no time: then only what the scheduler itself has to answer tells.
        silent_s = max(ages) if ages else self._scheduler.silent_s()
        if silent_s > SCHEDULER_SILENT_S:
            return Known("unresponsive", "loads", "derived", now)
        if ready is not None:
            return Known("up" if ready else "starting", "ready", "measured", now)
        return Known("up", "loads" if entries else "model_info", "derived", now)

    def _without_answer(self, health: Health, error: SourceError, now: float) -> Snapshot:
        if not self._is_sglang:
            raise error
        server = self._server(str(error))
        return Snapshot(server=msgspec.structs.replace(server, health=Known(health, "http", at=now)))

    def _server(self, no_info: str) -> Server:
        model = Fields(self._model.data, "model_info", self._model.at) if self._model else Fields({}, "model_info", 0.0)
        if self._info is not None:
            server = self._info.server
        else:
            why = unknown(no_info)
            server = Server(args=why, **dict.fromkeys(SERVER_FROM_ARGUMENTS, why))
        served = model.text("served_model_name")
        known = isinstance(self._release, Known)
        return msgspec.structs.replace(
            server,
            release=self._release if known else unknown("no endpoint tells the release"),
            url=Known(self._transport.url, "http"),
            model_path=model.text("model_path"),
            served_model_name=served if isinstance(served, Known) else server.served_model_name,
        )


class _Kept(msgspec.Struct, frozen=True):
    """An answer that is asked for rarely, and when it came."""

    data: Mapping[str, Any]
    at: float

    def age(self, now: float) -> float:
        return abs(now - self.at)


class _Failed(msgspec.Struct, frozen=True):
    """An endpoint that answered with an error, and when it may be asked again."""

    reason: str
    until: float


class _Patience:
    """When to ask a scheduler again that has not answered: each question to a hanging one stays in its queue."""

    def __init__(self) -> None:
        self.answered()

    def answered(self) -> None:
        self._unanswered = 0
        self._since = self._last = self._until = 0.0

    def did_not_answer(self, now: float) -> None:
        self._since = self._since or now
        self._last = now
        # Two questions in a row that fail are no accident; from then on they come ever more rarely.
        self._unanswered += 1
        pause_s = min(_SHORTEST_PAUSE_S * 2 ** max(self._unanswered - 2, 0), _LONGEST_PAUSE_S)
        self._until = now + pause_s

    def must_wait(self, now: float) -> bool:
        return now < self._until

    def silent_s(self) -> float:
        """Between the first and the last question that were not answered, whatever time has passed since."""
        return self._last - self._since


def entries_of(loads: Mapping[str, Any], now: float, layout: Layout, speculates: bool | None) -> list[Load]:
    """The loads in an answer of ``/v1/loads`` that came at unix time ``now``."""
    entries = loads.get("loads")
    return [
        load(entry, "loads", now - _age(entry, loads), layout, speculates=speculates)
        for entry in (entries[:_MAX_RANKS] if isinstance(entries, list) else [])
        if isinstance(entry, dict)
    ]


def _age(entry: Mapping[str, Any], loads: Mapping[str, Any]) -> float:
    """Seconds since the scheduler wrote ``entry``, by the server's own clock; 0 before 0.5.18, which does not tell."""
    written, sent = entry.get("timestamp"), loads.get("timestamp")
    if not isinstance(written, float) or not isinstance(sent, str):
        return 0.0
    try:
        return max(datetime.fromisoformat(sent).timestamp() - written, 0.0)
    except (ValueError, OverflowError):
        return 0.0


def _joined(loads: Mapping[RankId, Rank], states: tuple[Rank, ...], silence: Unknown) -> tuple[Rank, ...]:
    """Each rank's load over its internal state; where there is no load, ``silence`` says why."""
    told = {rank.id: rank for rank in states}
    pool = KvPool(used_tokens=silence, usage_ratio=silence)
    silent = Rank(id=RankId(), running_requests=silence, waiting_requests=silence, decode_tokens_per_s=silence, kv=pool)
    return tuple(
        lay_over(loads.get(rank) or msgspec.structs.replace(silent, id=rank), told.get(rank) or Rank(id=rank))
        for rank in sorted(loads.keys() | told.keys())
    )


def _owner(models: bytes) -> str:
    """``owned_by`` of an OpenAI-style model list: each serving engine puts its own name there."""
    try:
        owner = msgspec.json.decode(models)["data"][0]["owned_by"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
    return owner if isinstance(owner, str) else ""
