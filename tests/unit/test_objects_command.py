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
from sgdiag.session import objects
from sgdiag.session.attach import Access
from sgdiag.session.objects import normal, without_secrets
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


def test_secrets_are_not_shown() -> None:
    arguments = {"object": "ServerArgs", "attributes": {"api_key": "s3cret", "port": 1, "model": "m"}}
    shown = json.dumps(without_secrets("scheduler.server_args", arguments))
    assert "s3cret" not in shown and '"port": 1' in shown and '"model": "m"' in shown
    assert without_secrets("scheduler.server_args.api_key", "s3cret") == "***"
    assert "s3cret" not in json.dumps(without_secrets("a.b", {"dict": [["admin_api_key", "s3cret"], ["x", 1]]}))
    assert without_secrets("scheduler.forward_ct", 7) == 7
