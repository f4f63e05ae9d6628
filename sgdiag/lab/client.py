"""HTTP to a lab server: on this machine only, always with a limit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import urllib3

from sgdiag.lab.errors import LabError
from sgdiag.lab.state import Lab


class Generation(msgspec.Struct, frozen=True):
    """One greedy generation: its tokens, and how many verify steps made them (None without speculation)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    verify_count: int | None


class Client:
    """Requests to one lab over at most `connections` kept connections; may be shared by as many threads."""

    def __init__(self, lab: Lab, connections: int = 1) -> None:
        headers = {} if lab.api_key is None else {"Authorization": f"Bearer {lab.api_key}"}
        self._lab = lab
        self._pool = urllib3.HTTPConnectionPool(
            "127.0.0.1", lab.port, maxsize=connections, headers=headers, retries=False
        )

    def close(self) -> None:
        """Drop the kept connections."""
        self._pool.close()

    def healthy(self, limit_s: float) -> bool:
        """Whether /health answers 200 within the limit; any failure is a no."""
        try:
            return self._pool.request("GET", "/health", timeout=limit_s).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, limit_s: float, *, ignore_eos: bool = True
    ) -> Generation:
        """Continue `prompt` (token ids) greedily by exactly `max_new_tokens`; LabError says why it could not."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
        }
        try:
            response = self._pool.request("POST", "/generate", json=body, timeout=limit_s)
        except urllib3.exceptions.HTTPError as error:
            raise LabError(f"lab {self._lab.name}: no answer from {self._lab.url} ({type(error).__name__})") from None
        if response.status != 200:
            text = response.data.decode(errors="replace").strip()[:200]
            raise LabError(f"lab {self._lab.name}: {self._lab.url}/generate answered {response.status}: {text}")
        return parse_generation(prompt, response.data)


def parse_generation(prompt: Sequence[int], body: bytes) -> Generation:
    """The generation in a /generate response; LabError if it is none."""
    try:
        answer: dict[str, Any] = json.loads(body)
        meta = answer["meta_info"]
        tokens = tuple(int(token) for token in answer["output_ids"])
        return Generation(tuple(prompt), tokens, meta.get("spec_verify_ct"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"/generate answered something else than a generation ({error!r})") from None
