"""A recording of a real server that prints every prompt holds none, and no secret that the server was started with."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import urllib3

from sgdiag import lab
from sgdiag.lab.pool import LabPool
from sgdiag.session.recording import read_frames, read_index

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

KEY, TOKEN, HOST = "key-of-the-api-7731", "hub-token-9942-xyz", "obelix-7"
PROMPT = "the knee of my neighbour hurts"
LEVEL = ["--log-requests", "--log-requests-level", "3"]


def sgdiag(*arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgdiag", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "SGDIAG_API_KEY": key},
    )


@pytest.mark.parametrize("release", [next(iter(lab.RELEASES)), lab.NEWEST])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_recording_of_a_server_that_prints_every_prompt(
    release: str, form: str, lab_server: LabPool, tmp_path: Path
) -> None:
    server = lab_server(
        release,
        api_key=KEY,
        extra_args=[*LEVEL, "--log-requests-format", form],
        env={"SGLANG_HUB_TOKEN": TOKEN, "HOSTNAME": HOST, "CUDA_NOTE": f"made on {HOST}"},
    )
    http = urllib3.PoolManager(headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
    for _ in range(3):
        body = json.dumps({"text": PROMPT, "sampling_params": {"max_new_tokens": 4}})
        assert http.request("POST", f"{server.url}/generate", body=body).status == 200
    log = Path(server.log).read_text(errors="replace")
    assert PROMPT in log
    path, plain = tmp_path / "a.sgdiag", tmp_path / "plain.sgdiag"
    done = sgdiag("record", str(server.pid), "-o", str(path), "--for", "3s", key=KEY)
    assert done.returncode == 0, done.stderr
    written = gzip.decompress(path.read_bytes()).decode()
    assert not [private for private in (KEY, TOKEN, HOST, "knee", "neighbour") if private in written]
    assert "prompt text in " in done.stderr
    frames = list(read_frames(path))
    assert len(frames) == 3
    assert frames[-1].server.health.value == "up"
    assert frames[-1].collectives.environment.value["CUDA_NOTE"] == "made on host-1"
    lines = [line for excerpt in read_index(path).excerpts for line in excerpt.lines]
    assert any("server_args=" in line for line in lines)
    # What the test would miss if the server had never said any of it where sgdiag looks.
    assert sgdiag("record", str(server.pid), "-o", str(plain), "--for", "1s", "--no-redact", key=KEY).returncode == 0
    kept = gzip.decompress(plain.read_bytes()).decode()
    assert all(private in kept for private in (HOST, PROMPT))
    assert KEY not in kept

    def told(file: Path) -> list[tuple[str, str]]:
        findings = json.loads(sgdiag("check", "--json", str(file)).stdout)["findings"]
        return [(finding["id"], finding["verdict"]) for finding in findings]

    assert told(path) == told(plain)
    # No other test asks for this one.
    lab_server.end(server)
