from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import (
    Collectives,
    Finding,
    Known,
    Log,
    LogLine,
    NcclCommunicator,
    NcclRank,
    NcclRas,
    Process,
    Server,
    Snapshot,
)
from sgdiag.releases.redaction import KINDS, Kind, Private, Redactor, redact
from sgdiag.resources import recording
from sgdiag.rules import evaluate
from sgdiag.rules.postmortem import explain
from sgdiag.session.recording import read_frames
from sgdiag.sources.postmortem import incident_of
from tests import samples
from tests.made_snapshots import full_snapshot, numbers_of, strings_of

PRIVATE = Private(
    secrets=frozenset({"tr0ub4dor-and-3"}),
    hosts=frozenset({"titania", "gpu-box-17.lab.example"}),
    users=frozenset({"asmith"}),
)

PLANTS: dict[str, tuple[Kind, str, str]] = {
    "flag": ("secret", "--api-key {}", "hunter2-and-more"),
    "flag with =": ("secret", "--admin-api-key={}", "hunter2-and-more"),
    "setting": ("secret", "api_key='{}',", "hunter2 and more"),
    "variable": ("secret", "AWS_SECRET_ACCESS_KEY={}", "wJalrXUtnFEMIK7MDENGbPxRfiCY"),
    "header": ("secret", "Authorization: Bearer {}", "abcdef.0123456789"),
    "hub token": ("secret", "{}", "hf_QwErTyUiOpAsDfGhJkLz"),
    "platform token": ("secret", "{}", "sk-proj-QwErTyUiOpAsDfGhJkLz"),
    "cloud key": ("secret", "{}", "AKIAIOSFODNN7EXAMPLE"),
    "web token": ("secret", "{}", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w"),
    "password in a URL": ("secret", "https://bob:{}@proxy:3128/", "pa55word"),
    "secret that is known": ("secret", "{}", "tr0ub4dor-and-3"),
    "request": ("prompt text", "Receive: obj=GenerateReqInput(rid='a', text='{}', stream=False)", "my knee hurts"),
    "answer": ("prompt text", "Finish: obj=GenerateReqInput(rid='a'), out={{'text': \"{}\"}}", "then rest it"),
    "stop words": ("prompt text", "Receive: obj=GenerateReqInput(sampling_params={{'stop': ['{}']}})", "my knee"),
    "request as JSON": ("prompt text", '{{"event": "request.received", "obj": {{"text": "{}"}}}}', "my knee hurts"),
    "request cut short": ("prompt text", "Receive: obj=GenerateReqInput(text='{}", "my knee hurts"),
    "token ids": ("prompt text", "input_ids=[{}]", "151644, 8948, 198, 2610"),
    "messages": ("prompt text", "messages=[{{'role': 'user', 'content': '{}'}}]", "my knee hurts"),
    "grammar": ("prompt text", "Hit invalid json_schema: key_string='{}', e=ValueError()", '{"knee": 1}'),
    "validation": ("prompt text", "[type=int_parsing, input_value='{}', input_type=str]", "my knee hurts"),
    "parser": ("prompt text", "[GigaChat3] parse_streaming_increment: {}", "my knee hurts"),
    "query": ("prompt text", '"GET /generate?{} HTTP/1.1" 200 OK', "text=my+knee+hurts"),
    "quotation": (
        "prompt text",
        "bad request '{}' given",
        "please tell me what to do about the knee that hurts so much",
    ),
    "quotation in Chinese": (
        "prompt text",
        "bad request '{}' given",
        "\u8bf7\u544a\u8bc9\u6211\u819d\u76d6\u75bc\u75db\u65f6\u8be5\u600e\u4e48\u529e" * 2,
    ),
    "host that is known": ("host name", "{}", "titania"),
    "its short name": ("host name", "on {}_0", "gpu-box-17"),
    "host of a URL": ("host name", "http://{}:30000/health", "obelix"),
    "host by NCCL": ("host name", "{}:4411:4502 [1] NCCL INFO Bootstrap", "obelix9"),
    "host by torch": ("host name", "addr=[{}]:54074", "obelix"),
    "host by a flag": ("host name", "--dist-init-addr {}:5000", "obelix"),
    "host by a setting": ("host name", "dist_init_addr='{}:5000'", "obelix"),
    "host in words": ("host name", "failed to connect to host {}, giving up", "obelix-7"),
    "host of mail": ("host name", "jane@{}", "mail-7.gaul"),
    "full name": ("host name", "no route to {}", "obelix.cs.example.edu"),
    "pod": ("host name", "{}", "sglang-0.sglang.prod.svc.cluster.local"),
    "cloud host": ("host name", "{}", "ip-10-77-3-9"),
    "IPv4": ("address", "{}", "10.77.3.9"),
    "IPv4 with a port": ("address", "Connection closed by peer [{}]:41022", "203.0.113.77"),
    "IPv4 by NCCL": ("address", "Using eth0:{}<0>", "10.77.3.9"),
    "IPv6": ("address", "{}", "fd12:3456:789a::beef"),
    "IPv6 with a port": ("address", "[{}]:30000", "2a02:26f7:c9c8::66"),
    "MAC": ("address", "{}", "3c:ec:ef:12:34:56"),
    "home": ("user name", "/home/{}/models/x", "obelix"),
    "home on a share": ("user name", "/mnt/nfs/home/{}/x.log", "obelix"),
    "home by tilde": ("user name", "~{}/x", "obelix"),
    "user variable": ("user name", "USER={}", "obelix"),
    "user of a URL": ("user name", "ssh://{}@10.1.1.1/x", "obelix"),
    "mail": ("user name", "{}@example.com", "jane.doe"),
    "user that is known": ("user name", "/tmp/{}_cache", "asmith"),
    "GPU": ("device id", "{}", "GPU-5d3a2b10-1111-2222-3333-abcdefabcdef"),
}
"""What is planted: its kind, the text around it, and what must not be left."""


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_in_every_string_does_not_survive_in_any(name: str, known: bool) -> None:
    kind, around, private = PLANTS[name]
    planted = around.format(private)
    redactor = Redactor(PRIVATE)
    before = full_snapshot(lambda field: f"<{field}> {planted}", known=known)
    after = redactor.snapshot(before)
    left = [text for text in strings_of(after) if private.lower() in text.lower()]
    assert not left
    assert redactor.report()[kind].times > 0
    assert list(numbers_of(after)) == list(numbers_of(before))


def test_nothing_is_forgotten_by_the_maker_of_snapshots() -> None:
    """Every string field of the model is planted in, by the field's name."""
    fields: set[str] = set()

    def say(field: str) -> str:
        fields.add(field)
        return "x"

    full_snapshot(say)
    full_snapshot(say, known=False)
    kinds = {type(thing) for thing in _structs(full_snapshot(say))} | {
        type(thing) for thing in _structs(full_snapshot(say, known=False))
    }
    with_text = set()
    for kind in kinds:
        for name in kind.__struct_fields__:
            if re.search(r"\bstr\b|\bAny\b", str(kind.__annotations__[name])) and "Literal" not in str(
                kind.__annotations__[name]
            ):
                with_text.add(f"{kind.__name__}.{name}")
    assert with_text <= fields
    assert len(fields) > 80


def _structs(thing: object) -> list[msgspec.Struct]:
    found: list[msgspec.Struct] = []
    if isinstance(thing, msgspec.Struct):
        found.append(thing)
        for name in thing.__struct_fields__:
            found += _structs(getattr(thing, name))
    elif isinstance(thing, dict):
        for value in thing.values():
            found += _structs(value)
    elif isinstance(thing, tuple | list):
        for item in thing:
            found += _structs(item)
    return found


around = st.lists(
    st.sampled_from(["", " ", "x ", ", ", "(", ") ", "'", " = ", "\n", "\u2192 ", "[TP0] "]), max_size=4
).map("".join)


@given(name=st.sampled_from(sorted(PLANTS)), before=around, after=around)
def test_it_does_not_survive_among_other_text_either(name: str, before: str, after: str) -> None:
    _, form, private = PLANTS[name]
    shown = Redactor(PRIVATE).text(f"{before} {form.format(private)} {after}")
    assert private not in shown


@given(st.lists(st.sampled_from([form.format(private) for _, form, private in PLANTS.values()]), max_size=6))
def test_what_was_redacted_stays_as_it_is(texts: list[str]) -> None:
    once = redact(Snapshot(log=Log(tail=tuple(LogLine(1, text) for text in texts))), PRIVATE)
    assert redact(once, PRIVATE) == once


def lines(*texts: str) -> Snapshot:
    return Snapshot(log=Log(tail=tuple(LogLine(number, text) for number, text in enumerate(texts, 1))))


def shown(snapshot: Snapshot) -> list[str]:
    return [line.text for line in snapshot.log.tail]


def test_one_host_has_one_stand_in_wherever_it_stands() -> None:
    ranks = tuple(NcclRank(rank=number, host=host) for number, host in enumerate(["node-a", "node-b", "node-a"]))
    ras = NcclRas(communicators=(NcclCommunicator(id="1", size_ranks=3, ranks=ranks),))
    snapshot = msgspec.structs.replace(
        lines("lost node-b first", "http://node-a.example.com:1/", "10.1.1.1 and 10.1.1.2, 10.1.1.1"),
        collectives=Collectives(ras=Known(ras, "ncclras")),
    )
    redactor = Redactor()
    after = redactor.snapshot(snapshot)
    told = after.collectives.ras.value.communicators[0].ranks
    assert told[0].host == told[2].host != told[1].host
    first, second, third = shown(after)
    assert first == f"lost {told[1].host} first"
    assert second == f"http://{told[0].host}:1/"
    one, other, again = re.findall(r"[\d.]{7,}", third)
    assert one == again != other
    later = redactor.snapshot(lines("node-a is back"))
    assert shown(later) == [f"{told[0].host} is back"]


def test_a_name_is_replaced_in_what_came_before_it_in_the_same_snapshot() -> None:
    assert "obelix7" not in "".join(shown(redact(lines("obelix7 is slow", "obelix7:1:2 [0] NCCL INFO x"))))


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:30000",
        "http://localhost:30000/health",
        "--host 0.0.0.0 --port 30000",
        "[::1]:30000 and [::]:80",
        "/root/.cache and /data/models/meta-llama/Llama-3.1-8B-Instruct",
        "nvidia-cudnn-cu12==9.10.2.21, version 12.4.5.8",
        "2026-11-29 22:27:13 elapsed 12:34:56",
        "std::vector<at::Tensor>, c10d::ProcessGroupNCCL, a::b",
        "sglang.srt.managers.scheduler.run_scheduler_process (sglang/srt/managers/scheduler.py:5344)",
        "NCCL_SOCKET_IFNAME=eth0, NCCL_IB_HCA=mlx5_0,mlx5_1",
        "hf_chat_template_name, kv_cache_dtype=fp8_e5m2, speculative_algorithm='EAGLE3'",
        "https://huggingface.co/Qwen/Qwen3-8B",
        "Cuda failure 905 'operation would make the legacy stream depend on a capturing blocking stream'",
        "Finish: obj=GenerateReqInput(rid='0123456789abcdef0123456789abcdef', stream=False), "
        "out={'meta_info': {'finish_reason': {'type': 'stop'}, 'e2e_latency': 0.25}}",
        "org/model@a1b2c3d",
        "copy from host to device, cannot connect to the server, connect to peer. [rank0]:12 hostname: unknown",
        "Decode batch, #running-req: 2, #token: 1234, token usage: 0.12, accept len: 2.81, cuda graph: True",
        "sglang::scheduler_DP0_TP1",
        "it can't be that the pool isn't large enough for what we'd have to keep in it at once",
    ],
)
def test_what_a_diagnosis_needs_is_left(text: str) -> None:
    assert Redactor(PRIVATE).text(text) == text


def test_a_word_that_stands_where_a_name_does_means_what_it_says_elsewhere() -> None:
    redactor = Redactor(Private(hosts=frozenset({"llama"}), secrets=frozenset({"disabled"})))
    assert (
        redactor.text("/home/config/x, user=failed, http://running:1") == "/home/user-1/x, user=user-2, http://host-1:1"
    )
    for text in (
        "config failed: running",
        "login: failed",
        "forward (sglang/srt/models/llama.py:3)",
        "graphs are disabled",
    ):
        assert redactor.text(text) == text


def test_hosts_of_the_same_short_name_are_told_apart() -> None:
    redactor = Redactor()
    told = redactor.text("http://node-1.rome.lan/ http://node-1.gaul.lan/ node-1 http://node-1.rome.lan/")
    assert told == "http://host-1/ http://host-2/ host-1 http://host-1/"
    assert redactor.report()["host name"].names == 2


def test_addresses_are_numbered_in_order_and_each_is_one() -> None:
    told = Redactor().text("10.1.1.1, ::ffff:10.1.1.2, fd12:3456::1, 10.1.1.1")
    assert told == "198.18.0.1, 2001:db8::2, 2001:db8::3, 198.18.0.1"


def test_versions_are_no_addresses_but_what_else_is_said_beside_them_is() -> None:
    versions = {"nvidia-cudnn-cu12": "9.10.2.21", "torch": "2.9.1", "sglang": "0.5.9 from 10.1.2.3"}
    after = redact(Snapshot(server=Server(packages=Known(versions, "x"), pinned=Known(versions, "x"))))
    for fact in (after.server.packages, after.server.pinned):
        assert fact.value == versions | {"sglang": "0.5.9 from 198.18.0.1"}


def test_a_login_that_is_a_word_is_replaced_only_where_a_login_stands() -> None:
    private = Private(users=frozenset({"max", "running", "root"}), hosts=frozenset({"scheduler"}))
    text = "max_running_requests: max 3, /home/max/x, /root/y, sglang::scheduler"
    assert Redactor(private).text(text) == text.replace("/home/max", "/home/user-1")


def test_how_often_is_counted_once_for_each_text() -> None:
    redactor = Redactor()
    for _ in range(3):
        redactor.snapshot(lines("10.1.1.1 10.1.1.2", "10.1.1.1", "obelix9:1:2 [0] NCCL INFO x"))
    redactor.snapshot(lines("asterix9:1:2 [0] NCCL INFO x"))
    report = redactor.report()
    assert (report["address"].names, report["address"].times) == (2, 3)
    assert (report["host name"].names, report["host name"].times) == (2, 2)
    assert list(report) == [kind for kind in KINDS if kind in report]


def told(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.id, finding.verdict) for finding in findings]


@pytest.mark.parametrize("name", ["connected", "plain_cpu", "stale", "hung", "down", "disconnected"])
def test_findings_about_samples_are_the_same(name: str) -> None:
    snapshot = getattr(samples, name)(3) if name == "connected" else getattr(samples, name)()
    assert told(evaluate(redact(snapshot))) == told(evaluate(snapshot))


def test_findings_about_a_real_server_are_the_same() -> None:
    redactor = Redactor()
    for snapshot in read_frames(recording("demo.sgdiag")):
        assert told(evaluate(redactor.snapshot(snapshot))) == told(evaluate(snapshot))


INCIDENTS = sorted((Path(__file__).parents[1] / "data" / "incidents").rglob("*.log"))


def test_what_killed_a_server_is_still_told_by_its_redacted_log() -> None:
    assert len(INCIDENTS) > 100
    changed = 0
    for path in INCIDENTS:
        text = path.read_bytes()
        incident = incident_of(text)
        redactor = Redactor()
        plain = redactor.texts(text.decode("utf-8", "replace").split("\n"))
        again = incident_of("\n".join(plain).encode())
        assert told(explain(again)) == told(explain(incident)), path.name
        assert told(evaluate(redact(incident.snapshot))) == told(evaluate(incident.snapshot)), path.name
        changed += bool(redactor.report())
    assert changed > 20


def test_a_process_and_its_environment() -> None:
    environment = {"HF_HOME": "/home/obelix/.cache/hf", "MASTER_ADDR": "idefix", "NCCL_DEBUG": "INFO"}
    process = Process(
        pid=7, environment=Known(environment, "environ"), log_path=Known("/home/obelix/idefix.log", "procfs:fd")
    )
    after = redact(Snapshot(processes=(process,))).processes[0]
    assert after.environment.value == {
        "HF_HOME": "/home/user-1/.cache/hf",
        "MASTER_ADDR": "host-1",
        "NCCL_DEBUG": "INFO",
    }
    assert after.log_path.value == "/home/user-1/host-1.log"
