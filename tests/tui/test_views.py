"""The screens as pure functions, at any size and with anything unknown."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from sgdiag.analysis.kv.budget import ROUNDING_BYTES, budget_of
from sgdiag.cli.screen import render_once
from sgdiag.model import (
    NOT_ASKED,
    Collectives,
    Communicator,
    Gpu,
    GpuProcess,
    Gpus,
    GraphSet,
    Known,
    Process,
    Server,
    Snapshot,
    unknown,
)
from sgdiag.tui.app import PAGES
from sgdiag.tui.paint import Column, Fields, Look, Row, Table, fit, provenance, wrap
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.banner import banner
from sgdiag.tui.views.common import health
from sgdiag.tui.views.processes import branches
from tests import samples

EVERY = [
    Snapshot(),
    samples.connected(),
    samples.plain_cpu(),
    samples.stale(),
    samples.disconnected(),
    samples.many_ranks(64),
    samples.hung(),
    samples.hung(64),
]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("sources", [False, True])
def test_no_line_is_wider_than_the_room(page: str, sources: bool) -> None:
    for snapshot in (*EVERY, samples.hostile()):
        for width in (40, 60, 77, 117, 197):
            scene = Scene(Look(snapshot, sources=sources), width, 24, findings=samples.findings())
            for line in PAGES[page](scene):
                assert line.cell_len <= width, line.plain


@pytest.mark.parametrize("page", PAGES)
def test_any_width_draws(page: str) -> None:
    for snapshot in EVERY:
        for width in range(1, 40):
            PAGES[page](Scene(Look(snapshot), width, 5))


@given(st.text(max_size=60), st.integers(1, 30), st.integers(0, 4))
def test_wrap_loses_nothing_but_blanks(text: str, width: int, indent: int) -> None:
    source = Look(Snapshot()).ink(text)
    lines = wrap(source, width + indent, indent)
    assert "".join("".join(line.plain.split()) for line in lines) == "".join(source.plain.split())


@given(st.text(alphabet="ab漢é", max_size=30), st.integers(0, 40), st.booleans())
def test_fit_is_exact(text: str, width: int, right: bool) -> None:
    assert fit(Text(text), width, right=right).cell_len == width


def test_banner_is_silent_on_a_healthy_server() -> None:
    assert banner(Scene(Look(samples.connected()), 80, 24)) is None
    assert banner(Scene(Look(samples.plain_cpu()), 80, 24)) is None


def test_banner_before_the_first_answer() -> None:
    message = banner(Scene(Look(Snapshot(target="pid 7")), 80, 24))
    assert message is not None
    assert message[0] == "◐ connecting to pid 7 …"


def test_banner_tells_since_when_only_where_that_is_known() -> None:
    def told(health: str, begun_s: float) -> str:
        server = Server(
            health=Known(health, "http", at=1000.0),  # type: ignore[arg-type]
            started_at=Known(1000.5 - begun_s, "procfs"),
        )
        message = banner(Scene(Look(Snapshot(at=1000.5, server=server)), 80, 24))
        assert message is not None
        return message[0]

    assert re.fullmatch(r"◐ server is starting since \S+ \(7s\)", told("starting", 7.0))
    assert told("unresponsive", 700.0) == "▲ server does not answer"
    assert told("down", 700.0) == "✗ server is down: what you see is what was last known"


def test_banner_of_a_scheduler_that_repeats_itself() -> None:
    snapshot = samples.connected()
    later = msgspec.structs.replace(snapshot, at=snapshot.at + 60)
    message = banner(Scene(Look(later), 80, 24))
    assert message is not None
    assert message[0].startswith("▲ scheduler is silent for 1m")


def test_banner_of_a_silent_source() -> None:
    snapshot = samples.stale()
    up = msgspec.structs.replace(snapshot, server=samples.connected().server)
    message = banner(Scene(Look(up), 80, 24))
    assert message is not None
    assert message[0] == "▲ http, metrics silent for 49s, values marked ~: no answer within 2 s"


@pytest.mark.parametrize(("reason", "word"), [("not read yet", "? no answer yet"), ("no server found", "? unknown")])
def test_health_that_is_not_known_says_whether_an_answer_may_come(reason: str, word: str) -> None:
    snapshot = samples.connected()
    server = msgspec.structs.replace(snapshot.server, health=unknown(reason))
    assert health(Look(msgspec.structs.replace(snapshot, server=server)), "unknown").plain == word


def test_banner_of_a_recording_without_sources() -> None:
    snapshot = msgspec.structs.replace(samples.connected(), sources=())
    assert banner(Scene(Look(snapshot), 80, 24)) is None


def test_process_tree_shows_each_process_once_even_in_a_ring() -> None:
    ring = (Process(pid=1, parent_pid=Known(2, "x")), Process(pid=2, parent_pid=Known(1, "x")), Process(pid=3))
    assert sorted(entry.pid for _, _, entry in branches(ring)) == [1, 2, 3]


def helpers(number: int, **changed: object) -> list[Process]:
    """What torch's compiler starts below a scheduler, one of them with what is ``changed``."""
    made = [
        Process(
            pid=100 + place,
            parent_pid=Known(10, "procfs"),
            role="other",
            state=Known("S", "procfs"),
            title=Known("compile_worker", "procfs"),
            threads=Known(2, "procfs"),
            memory_bytes=Known((place + 1) << 20, "procfs"),
        )
        for place in range(number)
    ]
    return [*made[:-1], msgspec.structs.replace(made[-1], **changed)]


def rows_of(entries: list[Process], *, sources: bool = False) -> list[str]:
    snapshot = Snapshot(processes=(Process(pid=10, role="scheduler"), *entries))
    lines = PAGES["processes"](Scene(Look(snapshot, sources=sources), 120, 40))
    return [line.plain for line in lines if "other" in line.plain]


def test_many_helpers_alike_stand_in_one_row() -> None:
    (row,) = rows_of(helpers(32))
    assert row.split()[:6] == ["└", "32", "others", "alike", "sleeping", "0%"]
    assert row.split()[6:9] == ["64", "≤32.0", "MiB"]
    assert len(rows_of(helpers(3))) == 3
    assert len([row for row in rows_of(helpers(32), sources=True) if "state" in row]) == 32


@pytest.mark.parametrize(
    "changed",
    [
        {"ports": Known((30000,), "procfs")},
        {"title": Known("something else", "procfs")},
        {"state": Known("Z", "procfs")},
        {"role": "detokenizer"},
    ],
)
def test_a_helper_that_differs_has_a_row_of_its_own(changed: dict[str, object]) -> None:
    assert len(rows_of(helpers(8, **changed))) == (1 if "role" in changed else 2)


def test_a_helper_that_holds_gpu_memory_has_a_row_of_its_own() -> None:
    entries = helpers(8)
    held = Gpu(
        index=0, processes=Known((GpuProcess(pid=entries[-1].pid, memory_bytes=Known(1 << 30, "nvml")),), "nvml")
    )
    snapshot = Snapshot(processes=(Process(pid=10, role="scheduler"), *entries), gpus=Gpus(devices=(held,)))
    text = text_of("processes", snapshot)
    assert "7 others" in text
    assert "GPU 0" in text


def test_a_table_is_cut_in_its_last_column_and_says_so_only_there() -> None:
    look = Look(Snapshot())
    columns = [Column("name", 4, right=False), Column("title", right=False)]
    rows = [[look.text("a"), look.text("short")], [look.text("b"), look.text("a long title")]]
    assert [line.plain for line in Table(columns, rows).lines(look, 12)] == [
        "name  title ",
        "a     short ",
        "b     a lon…",
    ]


def test_columns_without_room_stand_below_the_others() -> None:
    look = Look(Snapshot())
    columns = [Column("", 2, right=False), Column("bar", 3, flexible=True), Column("one"), Column("two"), Column("six")]
    rows = [[look.text(name), look.text(""), *map(look.text, ("11", "222", "6666"))] for name in "ab"]
    table = Table(columns, rows, gap=1, split=True)
    assert [line.plain.split() for line in table.lines(look, 13)] == [
        ["bar", "one"],
        ["a", "11"],
        ["b", "11"],
        ["two", "six"],
        ["a", "222", "6666"],
        ["b", "222", "6666"],
    ]
    assert [line.plain[:2] for line in table.lines(look, 4)] == ["  ", "a ", "b "] * 4


@pytest.mark.parametrize("snapshot", [samples.connected(), samples.many_ranks(4)])
def test_a_narrow_screen_of_the_pool_keeps_every_number(snapshot: Snapshot) -> None:
    def numbers(width: int) -> set[str]:
        lines = [line.plain for line in PAGES["kv"](Scene(Look(snapshot), width, 40))]
        assert max(map(len, lines)) <= width
        begin, end = (next(n for n, line in enumerate(lines) if line.startswith(title)) for title in ("Pool", "Usage"))
        table = "\n".join(lines[begin:end])
        return set(re.findall(r"[\d.,]*\d%?", table))

    wide = numbers(110)
    assert len(wide) >= 8
    for width in range(42, 80):
        assert numbers(width) == wide


def test_room_that_is_left_on_the_overview_goes_to_findings() -> None:
    def shown(height: int) -> int:
        scene = Scene(Look(samples.connected()), 78, height, findings=samples.findings())
        lines = [line.plain for line in PAGES["overview"](scene)]
        assert len(lines) <= max(height, 20)
        return sum(line.startswith(("✗ FAIL", "▲ WARN", "? UNKNOWN")) for line in lines)

    assert [shown(height) for height in (19, 20, 21, 22, 23)] == [1, 1, 2, 3, 3]


def test_what_stands_in_sentences_has_its_source_on_demand() -> None:
    def sources(page: str) -> str:
        scene = Scene(Look(samples.connected(), sources=True), 120, 40)
        return "\n".join(line.plain for line in PAGES[page](scene))

    shown = sources("processes")
    for label in ("0 link", "GPU 0 compute", "GPU 0 uuid", "GPU 0 processes"):
        assert re.search(rf"^{label} .*← nvml", shown, re.MULTILINE), label
    assert re.search(r"^TP0 while groups came up .*← log:\d+", sources("collectives"), re.MULTILINE)
    assert re.search(r"^(2 ranks|TP0) running requests .*← object:", sources("speculation"), re.MULTILINE)


@pytest.mark.parametrize(
    ("device", "ranks", "reason"),
    [
        ("cpu", 2, "ranks on a CPU do not use NCCL"),
        ("cuda", 1, "a single rank has nobody to talk to"),
        ("cuda", 2, "no source knows"),
    ],
)
def test_why_there_is_no_version_of_nccl(device: str, ranks: int, reason: str) -> None:
    groups = (Communicator(group="tp", size_ranks=Known(ranks, "object")),)
    snapshot = Snapshot(
        server=Server(device=Known(device, "object")),
        collectives=Collectives(nccl_version=unknown("no source knows"), communicators=groups),
    )
    assert f"? NCCL: {reason}" in text_of("collectives", snapshot)


def test_arguments_of_sglangs_own_come_last() -> None:
    server = Server(args=Known({"_resolved": "x", "tp_size": 2, "zeal": 1}, "object"))
    text = text_of("arguments", Snapshot(server=server))
    assert text.index("tp_size") < text.index("zeal") < text.index("_resolved")


def test_one_screen_is_plain_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(render_once(samples.connected(), samples.findings(), 100))
    text = out.getvalue()
    assert "\x1b" not in text
    assert "─" not in text
    assert "24 of 48" in text
    assert "✗ FAIL" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_one_screen_has_colour_on_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True).print(render_once(samples.connected(), None, 100))
    assert "\x1b[" in out.getvalue()


def test_one_screen_does_without_textual() -> None:
    program = "import sys, sgdiag.cli.screen; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def text_of(page: str, snapshot: Snapshot, width: int = 100) -> str:
    return "\n".join(line.plain for line in PAGES[page](Scene(Look(snapshot), width, 40)))


def with_batch(requests: int, **fields: object) -> Snapshot:
    """The connected server with another running batch on its first rank."""
    snapshot = samples.connected()
    batch = msgspec.structs.replace(snapshot.ranks[0].batches[0], requests=Known(requests, "object"), **fields)
    first = msgspec.structs.replace(snapshot.ranks[0], batches=(batch,))
    return msgspec.structs.replace(snapshot, ranks=(first, *snapshot.ranks[1:]))


def test_ranks_that_show_the_same_are_shown_once() -> None:
    text = text_of("speculation", samples.many_ranks(64))
    assert text.count("EagleDraftInput") == 1
    assert "64 ranks" in text
    assert text_of("speculation", with_batch(5)).count("EagleDraftInput") == 2


def test_graphs_tell_the_padding_of_the_running_batch() -> None:
    assert "1 request, 4 rows" in text_of("graphs", with_batch(11))
    assert "none" in text_of("graphs", with_batch(12))


def test_graphs_tell_why_a_batch_hits_none() -> None:
    assert "TP0: larger than any captured size: runs without a graph" in text_of("graphs", with_batch(49))
    large = with_batch(49)
    args = Known({"speculative_disable_batch_threshold": 48}, "server_info")
    plain = msgspec.structs.replace(large, server=msgspec.structs.replace(large.server, args=args))
    shown = text_of("graphs", plain)
    assert "TP0: so large a batch decodes plainly, on graphs of its own" in shown
    assert "runs without a graph" not in shown
    assert "TP0: EXTEND is not decoding" in text_of("graphs", with_batch(4, mode=Known("EXTEND", "object")))
    verify = {"draft_token": (4,), "retrieve_index": (4, 1)}
    narrow = with_batch(4, mode=Known("TARGET_VERIFY", "object"), spec_info_shapes=Known(verify, "object"))
    assert "TP0: captured for 4 tokens per request, this batch has 1" in text_of("graphs", narrow)


def test_a_batch_that_decodes_plainly_is_not_looked_for_on_draft_graphs() -> None:
    large = with_batch(49)
    args = Known({"speculative_disable_batch_threshold": 8}, "server_info")
    plain = msgspec.structs.replace(large, server=msgspec.structs.replace(large.server, args=args))
    told = [line for line in text_of("graphs", plain).splitlines() if line.startswith("running batch")]
    assert len(told) >= 2
    assert all("decodes plainly" in line for line in told)
    own = GraphSet(name="plain decode", enabled=Known(True, "log"), sizes=Known((16, 64), "log"))
    read = text_of("graphs", msgspec.structs.replace(plain, graphs=(*plain.graphs, own)))
    assert "─ on the graphs of plain decode\n" in read
    assert re.search(r"^TP0 +DECODE +49 +1 +64 +15 requests", read, re.MULTILINE)
    fuller = msgspec.structs.replace(own, sizes=Known((50,), "log"), tokens_per_request=Known(1, "log"))
    read = text_of("graphs", msgspec.structs.replace(plain, graphs=(*plain.graphs, fuller)))
    assert re.search(r"^TP0 +DECODE +49 +1 +50 +1 request, 1 row *$", read, re.MULTILINE)


NARROW = 58
"""The room on a terminal of 60 columns."""


def test_labels_are_whole_where_the_values_leave_room() -> None:
    text = text_of("kv", samples.connected(), width=NARROW)
    assert "predicted for pools  " in text
    rows = [Row("the label of a short value", Look(Snapshot()).text("7"))]
    (line,) = Fields(rows).lines(Look(Snapshot()), 40)
    assert line.plain.split("  ")[0] == "the label of a short value"
    assert Fields([Row("x" * 50, Look(Snapshot()).text("7"))]).lines(Look(Snapshot()), 40)[0].plain.endswith("… 7")


def test_what_a_narrow_table_has_no_room_for_stands_below() -> None:
    snapshot = samples.connected()
    assert "▲ orphan" in text_of("processes", snapshot, width=NARROW)
    assert "is not of this server" in " ".join(text_of("processes", snapshot, width=NARROW - 8).split())
    assert "EagleDraftInput" in text_of("speculation", snapshot, width=NARROW)
    assert "padding" in text_of("graphs", snapshot, width=NARROW)
    assert "symm. memory" in text_of("collectives", snapshot, width=NARROW)
    assert "PCIe 5 x16" in text_of("processes", snapshot, width=NARROW)
    assert {"core", "GPU"} <= set(text_of("stacks", samples.hung(), width=NARROW - 8).split())


def test_ports_are_whole_where_there_is_no_title() -> None:
    entry = Process(pid=7, ports=Known((23105, 36095, 39209), "procfs"))
    assert "23105 36095 39209" in text_of("processes", Snapshot(processes=(entry,)))


def test_sources_do_not_cut_a_value() -> None:
    cell = Look(Snapshot()).text("a reason that goes on for longer than the line has room for it")
    lines = provenance(Look(Snapshot(), sources=True), [("they differ", cell)], 40)
    assert " ".join(" ".join(line.plain for line in lines).split()) == f"they differ {cell.text.plain}"


def test_a_word_too_long_for_any_line_begins_where_it_stands() -> None:
    look = Look(Snapshot())
    assert [line.plain for line in wrap(look.ink("a source: " + "x" * 20), 14, 2)] == [
        "a source: xxxx",
        "  " + "x" * 12,
        "  " + "x" * 4,
    ]


def test_verify_input_is_told_in_requests() -> None:
    assert "draft_token 96 = 24 requests x 4 draft tokens" in text_of("speculation", samples.connected())


def test_the_memory_of_the_sample_adds_up() -> None:
    """Who judges the screen by it shall not look for the mistake in the screen."""
    snapshot = samples.connected()
    budget = budget_of(snapshot, snapshot.ranks[0])

    def taken(*terms: str) -> int:
        return sum(budget.term(term).value for term in terms)

    graphs = [term.id for term in budget.terms if term.id.startswith("graphs-")]
    left = taken("free-before-load")
    for terms, rest in (
        (("weights", "draft-weights"), "free-after-load"),
        (("kv-pool", "draft-pool", "request-table"), "free-after-pool"),
        (("workspaces", *graphs), "free-at-ready"),
    ):
        left -= taken(*terms)
        assert abs(left - taken(rest)) < ROUNDING_BYTES
    assert abs(budget.difference_bytes.value) < ROUNDING_BYTES
    gpu = snapshot.gpus.devices[0]
    assert gpu.memory_used_bytes.value + gpu.memory_free_bytes.value == gpu.memory_total_bytes.value
    assert sum(one.memory_bytes.value for one in gpu.processes.value) == pytest.approx(gpu.memory_used_bytes.value)


def test_arguments_are_shown_with_those_that_are_off_apart() -> None:
    text = text_of("arguments", samples.connected())
    assert "speculative_num_draft_tokens  4" in text
    assert "disable_radix_cache, enable_hierarchical_cache, lora_paths, trust_remote_code" in text
    assert f"? {NOT_ASKED.reason}" in text_of("arguments", Snapshot())
