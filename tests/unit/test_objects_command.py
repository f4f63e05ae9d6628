"""`sgdiag objects`: any path of a live scheduler, typed results, one line for errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from sgdiag.cli import cli
from sgdiag.cli.reports import Objects
from sgdiag.model import RankId, SgdiagError, unknown
from sgdiag.remote import Instance, Items, Member, Named, Octets, Pairs, Reference, Tensor, Text, Value, plain
from sgdiag.session import objects
from sgdiag.session.attach import Access
from sgdiag.session.object_secrets import without_secrets
from sgdiag.session.objects import normal
from sgdiag.sources.objects import SchedulerProcess
from tests.unit.test_objects_source import Toy, running


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    with running() as target:
        found = ({RankId(): target.pid}, unknown("nobody tells"))
        monkeypatch.setattr(objects, "find_schedulers", lambda *_: found)
        yield target


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["objects", "1", "--no-exec", *words])


def test_paths_are_printed_with_how_far_they_can_be_trusted(toy: Toy) -> None:
    printed = run("scheduler.forward_ct", "len(scheduler.waiting_queue)", "scheduler.nope", "scheduler.running_batch")
    assert printed.exit_code == 0, printed.output
    head, *lines = printed.stdout.splitlines()
    assert head == f"TP0  pid {toy.pid}  SGLang 0.5.9"
    assert [line.split()[:2] for line in lines[:3]] == [
        ["consistent", "scheduler.forward_ct"],
        ["consistent", "len(scheduler.waiting_queue)"],
        ["absent", "scheduler.nope"],
    ]
    assert lines[0].endswith(" 7") and lines[2].endswith("Scheduler has no attribute 'nope'")
    assert '"object": "ScheduleBatch"' in lines[3]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("scheduler.waiting_queu", "waiting_queue"),
        ("len(scheduler.waitingqueue)", "waiting_queue"),
        ("scheduler.running_batch.seq_len", "seq_lens_sum"),
        ("scheduler.runing_batch.reqs[0].rid", "running_batch"),
        ("scheduler.req_to_token_pool.free_slot[1]", "free_slots"),
        ("scheduler.slotted.a_very_long_nam", "a_very_long_name"),
        ("scheduler.waiting_queue.appendd", ""),
        ("scheduler.zzzz", ""),
        ('scheduler.running_batch["reqs"]', ""),
        ("scheduler.waiting_queue[7]", ""),
    ],
)
def test_a_misspelt_name_gets_near_ones(toy: Toy, path: str, near: str) -> None:
    (line,) = json.loads(run("--json", path).stdout)["ranks"][0]["lines"]
    assert line["status"] == "absent"
    _, bracket, said = line["reason"].partition(" (near it: ")
    assert near in said.rstrip(")").split(", ") if near else not bracket


def test_near_names_are_looked_for_again_without_new_memory(toy: Toy) -> None:
    with contextlib.closing(objects.Inspector(None, Access(run_child=False))) as inspector:
        first = inspector.look(["scheduler.waiting_queu"])
        (process,) = inspector._opened.values()
        assert isinstance(process, SchedulerProcess)
        groups = len(process.reader._failures)
        assert inspector.look(["scheduler.waiting_queu"]) == first
        assert len(process.reader._failures) == groups


def test_odd_contents_are_printed_without_harm(toy: Toy) -> None:
    (line,) = json.loads(run("--json", "scheduler.odd").stdout)["ranks"][0]["lines"]
    assert line["value"] == ["half \udc80", "\x1b[31mred", {"int": hex(1 << 20_000)}, {"float": "inf"}]
    printed = run("scheduler.odd").stdout
    assert "half ?" in printed and "red" in printed and "\x1b" not in printed


def test_without_a_path_all_that_is_known_is_listed(toy: Toy) -> None:
    printed = run("--json")
    (rank,) = json.loads(printed.stdout)["ranks"]
    lines = {line["name"]: line for line in rank["lines"]}
    assert lines["kv.page_size"] == {
        "name": "kv.page_size",
        "status": "consistent",
        "path": "scheduler.page_size",
        "value": 2,
    }
    assert lines["kv.dtype"]["status"] == "absent" and lines["kv.dtype"]["reason"]
    assert lines["memory.before_load"]["reason"].startswith("before 0.5.14")
    assert rank["complete"] is True
    assert msgspec.json.decode(printed.stdout, type=Objects).ranks[0].pid == toy.pid


def test_what_cannot_be_meant_is_one_line(toy: Toy) -> None:
    for words, text in (
        (["scheduler..x"], "not an attribute path"),
        (["nobody.x"], "no path starts with nobody"),
        (["--rank", "1"], "there is no rank 1"),
    ):
        failed = run(*words)
        assert isinstance(failed.exception, SgdiagError)
        assert text in failed.exception.problem and failed.exception.remedy


def test_a_process_that_ends_meanwhile_is_said(toy: Toy) -> None:
    inspector = objects.Inspector(None, Access(run_child=False))
    toy.process.kill()
    toy.process.wait()
    (rank,) = inspector.look(["scheduler.forward_ct"])
    assert rank.problem == f"process {toy.pid} has ended"
    inspector.close()


def test_a_log_file_has_no_objects(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("text")
    failed = CliRunner().invoke(cli, ["objects", str(tmp_path / "server.log"), "scheduler.x"])
    assert isinstance(failed.exception, SgdiagError) and "is a file" in failed.exception.problem


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Scheduler.waiting_queue", "scheduler.waiting_queue"),
        ("object:len(Scheduler.waiting_queue)", "len(scheduler.waiting_queue)"),
        ("scheduler.Scheduler", "scheduler.Scheduler"),
        ("parallel_state._TP", "parallel_state._TP"),
    ],
)
def test_a_facts_source_is_a_path(written: str, meant: str) -> None:
    assert normal(written) == meant


WORD = "s3cret-s3cret"


def instance(**attributes: Value) -> Instance:
    return Instance("Settings", tuple(attributes.items()), len(attributes))


def a_list(*items: Value) -> Items:
    return Items("list", items, len(items))


def a_dict(*pairs: tuple[Value, Value]) -> Pairs:
    return Pairs("dict", pairs, len(pairs))


def octets(text: str) -> Octets:
    return Octets("bytes", text.encode(), len(text))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("scheduler.server_args", instance(api_key=WORD)),
        ("scheduler.server_args.api_key", WORD),
        ("scheduler.server_args.api_keys[0]", WORD),
        ('scheduler.settings["hf-token"]["now"]', WORD),
        ("scheduler.settings.admin_token.text", WORD),
        ("scheduler.server_args.watermark.key_b", WORD),
        ("scheduler.server_args.watermark", a_dict(("key", WORD))),
        ("a.b", instance(watermark=a_dict(("key_a", WORD)))),
        ("a.b", a_dict(("admin_api_key", WORD), ("x", 1))),
        ("a.b", a_dict(("hf_token", a_list(1, a_list(WORD))))),
        ("a.b", a_dict(("api_keys", a_dict((WORD, 3))))),
        ("a.b", instance(password=instance(inner=instance(text=WORD)))),
        ("a.b", instance(secret=Instance("Str", (), 0, WORD))),
        ("a.b", instance(secret_key=octets(WORD))),
        ("a.b", instance(secret_key=Text(WORD, 9_000))),
        ("a.b", a_dict((octets("authorization"), octets(WORD)))),
        ("a.b", a_dict((Member("Setting", "API_KEY", 1), WORD))),
        ("a.headers", a_list(a_list(octets("authorization"), octets(WORD)))),
        ("a.argv", a_list("serve", "--admin-token", WORD, "--port", "1")),
        ("a.text", f"api_key={WORD}"),
        ("a.text", Text(f"api_key={WORD}", 9_000)),
        ("a.raw", octets(f"Authorization: Bearer {WORD}")),
    ],
)
def test_secrets_are_not_shown(path: str, value: Value) -> None:
    shown = json.dumps(plain(without_secrets(path, value)))
    assert WORD not in shown and WORD.encode().hex() not in shown
    assert "***" in shown


TENSOR = Tensor((2,), (1,), "int64", "cpu", 2, 0, 16, 0, (5, 6))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("scheduler.running_batch.spec_info.draft_token", TENSOR),
        ("scheduler.running_batch.spec_info.draft_token[0]", 5),
        ("a.b", instance(draft_token=TENSOR, retrieve_next_token=a_list(TENSOR, TENSOR), max_num_token=64)),
        ("scheduler.tree_cache.root_node.key", instance(token_ids=Items("array", (1, 2), 2), extra_key=None)),
        ("a.resident_key", Items("tuple", (1, 2), 2)),
        ("a.graph_key", a_dict((7, Reference("Graph", 0)))),
        ("a.draft_key", Named("class", "Key")),
        ("scheduler.req_to_token_pool.req_to_token.dtype", Named("dtype", "int32")),
        ("a.write_key", Member("Kind", "TOKEN", "token")),
        ("a.draft_config.mask_token", "<|mask|>"),
        ("a.b", instance(hf_tokenizer=a_dict(("eos_token", "</s>"), ("think_end_token", "</think>")))),
        ("a.tokens", a_list("ab", "cd")),
        ("a.raw", octets("plain")),
        ("a.api_key", ""),
        ("a.api_key", None),
        ("a.b", instance(api_key=None, use_token=True)),
        ("scheduler.forward_ct", 7),
    ],
)
def test_what_can_be_no_secret_is_shown_whatever_it_is_called(path: str, value: Value) -> None:
    assert without_secrets(path, value) == value


def test_a_secret_in_memory_does_not_leave_by_json_or_text(toy: Toy) -> None:
    paths = ["scheduler.server_args", "scheduler.draft_key", "scheduler.draft_key.text", "scheduler.keys_by_token"]
    for printed in (run(*paths).stdout, run("--json", *paths).stdout):
        assert "DraftReqKey" in printed and "[4, 5]" in printed and "***" in printed
        assert "s3cret" not in printed and b"s3cret".hex() not in printed
