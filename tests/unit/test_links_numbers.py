"""The model of links in round numbers, and the wirings link by link."""

from __future__ import annotations

import pytest

from sgdiag.analysis.links import published
from sgdiag.analysis.links.predict import calibrate, latency_s, left_out_ratio, line, simulate_s, spread_s, transfer_s
from sgdiag.analysis.links.published import (
    GPU_READ_S,
    GPU_WRITE_S,
    ROOT_READ_S,
    ROOT_WRITE_S,
    SOCKETS_READ_S,
    SOCKETS_WRITE_S,
    TREES_READ_S,
    TREES_WRITE_S,
    UPLINK_READ_S,
    UPLINK_WRITE_S,
    Table,
    on_sockets,
    on_switches,
    on_tree,
)
from sgdiag.analysis.links.shapes import (
    ISLAND_PUSH,
    ONE_SHOT_PACKETS,
    ONE_SHOT_PULL,
    ONE_SHOT_PUSH,
    TWO_SHOT_PUSH,
    Shape,
    islands,
    phases,
)
from sgdiag.analysis.links.wiring import Flow, Link, Routes, Wiring, collapsing, duration_s, fair_rates, kind_of

MB = 1_000_000


def star(gpus: int, bytes_per_s: float = MB) -> Wiring:
    """GPUs on one switch: 2 s for a write to it, 3 s for a read, 1 MB/s."""
    return Wiring(
        name="star", gpus=gpus, links=tuple(Link(f"gpu{i}", "switch0", bytes_per_s, 2.0, 3.0) for i in range(gpus))
    )


def test_latencies_are_those_of_the_longest_route_of_each_phase() -> None:
    assert latency_s(star(4), ONE_SHOT_PUSH) == 4.0
    assert latency_s(star(4), ONE_SHOT_PULL) == 4.0 + 6.0
    assert latency_s(star(4), TWO_SHOT_PUSH) == 8.0
    far = Wiring(name="far", gpus=3, links=(*star(2).links, Link("gpu2", "switch0", MB, 5.0, 9.0)))
    assert latency_s(far, ONE_SHOT_PUSH) == 7.0
    assert latency_s(far, ONE_SHOT_PULL) == 7.0 + 12.0


def test_transfers_take_what_the_gpus_and_their_links_let_through() -> None:
    # Three others to send a byte to, at half of 1 MB/s.
    assert transfer_s(star(4), ONE_SHOT_PUSH, 0.5) == pytest.approx(6 / MB)
    assert transfer_s(star(4), ONE_SHOT_PUSH, 9.0) == pytest.approx(3 / MB)
    assert transfer_s(star(4), ONE_SHOT_PACKETS, 9.0) == pytest.approx(6 / MB)
    assert transfer_s(star(4), TWO_SHOT_PUSH, 9.0) == pytest.approx(1.5 / MB)


def test_a_time_is_the_sum_of_its_parts() -> None:
    found = simulate_s(star(4), TWO_SHOT_PUSH, 2 * MB, fixed_s=10.0, share_ratio=9.0, phase_s=100.0)
    assert found == pytest.approx(10 + 8 + 100 + 3)
    assert simulate_s(star(4), ONE_SHOT_PUSH, MB, fixed_s=10.0, share_ratio=9.0, phase_s=100.0) == pytest.approx(
        10 + 4 + 3
    )


def test_a_line_weighs_relative_errors() -> None:
    start, slope = line([(0, 5.0), (10, 25.0), (20, 45.0)])
    assert [start, slope] == pytest.approx([5e-6, 2e-6])
    # The small time counts for more: the line passes nearer to it.
    start, slope = line([(0, 1.0), (10, 10.0), (20, 100.0)])
    assert abs(start * 1e6 - 1.0) < 0.5 < abs(start * 1e6 + 20 * slope * 1e6 - 100.0)


def table(name: str, *points: tuple[int, float], wiring: Wiring | None = None, **more: float) -> Table:
    return Table(name=name, wiring=wiring or star(2), shape=ONE_SHOT_PUSH, points=points, **more)  # type: ignore[arg-type]


def test_a_calibration_gives_back_what_the_times_were_made_of() -> None:
    def made(nbytes: int, fixed_s: float = 7.0, share: float = 0.5) -> tuple[int, float]:
        return nbytes, simulate_s(star(2), ONE_SHOT_PUSH, nbytes, fixed_s=fixed_s, share_ratio=share, phase_s=0.0) * 1e6

    found = calibrate(table("made", *(made(size * MB) for size in (1, 2, 4))))
    assert [found.fixed_s, found.share_ratio] == pytest.approx([7.0, 0.5])
    assert found.error_ratio == pytest.approx(0.0, abs=1e-9)
    assert (found.held_ratio, found.table, found.way) == (0.0, "made", "push")
    given = calibrate(table("given", made(MB), made(2 * MB), share_ratio=0.5))
    assert [given.fixed_s, given.error_ratio] == pytest.approx([7.0, 0.0], abs=1e-9)
    # One held back, twice as long as it would be.
    nbytes, us = made(8 * MB)
    held = calibrate(
        Table(
            name="held", wiring=star(2), shape=ONE_SHOT_PUSH, points=(made(MB), made(2 * MB)), held=((nbytes, 2 * us),)
        )
    )
    assert held.held_ratio == pytest.approx(0.5)
    off = calibrate(table("off", made(MB), (2 * MB, made(2 * MB)[1] * 1.5), made(4 * MB), share_ratio=0.5))
    assert 0.1 < off.error_ratio < 0.5


def test_a_range_spans_all_constants() -> None:
    slow = calibrate(table("slow", (MB, 20e6), (2 * MB, 22e6)))
    fast = calibrate(table("fast", (MB, 8e6), (2 * MB, 10e6)))
    both = spread_s(star(2), ONE_SHOT_PUSH, MB, [slow, fast])
    assert both.low == pytest.approx(spread_s(star(2), ONE_SHOT_PUSH, MB, [fast]).low)
    assert both.high == pytest.approx(spread_s(star(2), ONE_SHOT_PUSH, MB, [slow]).high)


def test_how_far_one_table_is_outside_of_what_the_others_give() -> None:
    quick, slow = table("quick", (MB, 10e6), (2 * MB, 12e6)), table("slow", (MB, 40e6), (2 * MB, 42e6))
    # 40 s where at most 10 s and a busy link are foreseen, and the reverse: three times too long at least.
    assert left_out_ratio((quick, slow)) > 1.5
    again = table("again", *quick.points)
    assert left_out_ratio((quick, again)) == pytest.approx(0.0, abs=1e-9)


def test_phases_of_each_shape() -> None:
    def flows(shape: Shape, ranks: int) -> list[set[tuple[int, int, float]]]:
        return [{(flow.source, flow.target, flow.nbytes) for flow in phase} for phase in phases(shape, ranks)]

    assert flows(ONE_SHOT_PUSH, 2) == [{(0, 1, 1.0), (1, 0, 1.0)}]
    assert flows(TWO_SHOT_PUSH, 2) == [{(0, 1, 0.5), (1, 0, 0.5)}] * 2
    inside = {(0, 1, 0.5), (1, 0, 0.5), (2, 3, 0.5), (3, 2, 0.5)}
    across = {(0, 2, 1.0), (2, 0, 1.0), (1, 3, 1.0), (3, 1, 1.0)}
    assert flows(ISLAND_PUSH, 4) == [inside, across, inside]
    whole = Shape("island-one-shot", "push", wire_ratio=2)
    assert flows(whole, 4) == [
        {(0, 1, 2.0), (1, 0, 2.0), (2, 3, 2.0), (3, 2, 2.0)},
        {(0, 2, 2.0), (2, 0, 2.0), (1, 3, 2.0), (3, 1, 2.0)},
    ]
    assert islands(6) == ((0, 1, 2), (3, 4, 5))
    assert ONE_SHOT_PACKETS.name == "one-shot push, packets"
    assert ONE_SHOT_PULL.name == "one-shot pull"
    for ranks in (2, 5):
        with pytest.raises(ValueError, match="even number of ranks"):
            phases(ISLAND_PUSH, ranks)


def ends(links: tuple[Link, ...]) -> dict[tuple[str, str], tuple[float, float, float]]:
    return {(link.a, link.b): (link.bytes_per_s, link.write_s, link.read_s) for link in links}


def test_gpus_on_root_ports() -> None:
    found = ends(on_sockets(2, 2, gpu_bytes_per_s=5.0, sockets_bytes_per_s=7.0))
    gpu, root, between = (
        (5.0, GPU_WRITE_S, GPU_READ_S),
        (5.0, ROOT_WRITE_S, ROOT_READ_S),
        (7.0, SOCKETS_WRITE_S, SOCKETS_READ_S),
    )
    assert found == {
        **{(f"gpu{i}", f"root{i}"): gpu for i in range(4)},
        **{(f"root{i}", f"socket{i // 2}"): root for i in range(4)},
        ("socket0", "socket1"): between,
    }


def test_gpus_on_switches() -> None:
    found = ends(on_switches(3, 2, sockets=2, gpu_bytes_per_s=5.0, uplink_bytes_per_s=6.0, sockets_bytes_per_s=7.0))
    uplink = (6.0, UPLINK_WRITE_S - ROOT_WRITE_S, UPLINK_READ_S - ROOT_READ_S)
    assert found == {
        **{(f"gpu{i}", f"switch{i // 2}"): (5.0, GPU_WRITE_S, GPU_READ_S) for i in range(6)},
        **{(f"switch{i}", f"root{i}"): uplink for i in range(3)},
        ("root0", "socket0"): (6.0, ROOT_WRITE_S, ROOT_READ_S),
        ("root1", "socket0"): (6.0, ROOT_WRITE_S, ROOT_READ_S),
        ("root2", "socket1"): (6.0, ROOT_WRITE_S, ROOT_READ_S),
        ("socket0", "socket1"): (7.0, SOCKETS_WRITE_S, SOCKETS_READ_S),
    }
    paired = set(ends(on_switches(4, 1, gpu_bytes_per_s=5.0, paired=True)).items()) - set(
        ends(on_switches(4, 1, gpu_bytes_per_s=5.0)).items()
    )
    assert paired == {(("switch0", "switch1"), (5.0, 0.0, 0.0)), (("switch2", "switch3"), (5.0, 0.0, 0.0))}


def test_gpus_on_trees() -> None:
    rate = published.GEN5_BYTES_PER_S
    found = ends(on_tree(2, 2, 2))
    assert found == {
        **{(f"gpu{i}", f"switch{1 + i // 2}"): (rate, GPU_WRITE_S, GPU_READ_S) for i in range(8)},
        ("switch1", "switch2"): (2 * rate, 0.0, 0.0),
        ("switch3", "switch4"): (2 * rate, 0.0, 0.0),
        **{(f"switch{i}", "switch0"): (rate, TREES_WRITE_S / 2, TREES_READ_S / 2) for i in range(1, 5)},
    }


def test_the_slowest_gpu_counts() -> None:
    mixed = Wiring(
        name="mixed",
        gpus=2,
        links=(
            Link("gpu0", "switch0", 5.0, 0, 0),
            Link("gpu1", "switch0", 3.0, 0, 0),
            Link("switch0", "root0", 1.0, 0, 0),
        ),
    )
    assert mixed.gpu_bytes_per_s == 3.0
    assert [kind_of(place) for place in ("gpu10", "switch0", "socket9")] == ["gpu", "switch", "socket"]


def test_links_are_shared_fairly() -> None:
    a, b, c = (Flow(source, target, 1.0, "push") for source, target in ((0, 1), (0, 2), (3, 2)))
    out0, into2, free = ("gpu0", "s"), ("s", "gpu2"), ("gpu3", "s")
    rates = fair_rates({a: [out0], b: [out0, into2], c: [free, into2]}, {out0: 2.0, into2: 10.0, free: 5.0})
    assert rates == {a: 1.0, b: 1.0, c: 5.0}


def test_all_flows_are_through_when_the_last_one_is() -> None:
    wiring = star(3)
    routes = Routes(wiring)
    engine = {"push": 1e12}
    # Two into one GPU share its link, then the longer one has it alone.
    flows = [Flow(0, 2, 1.0 * MB, "push"), Flow(1, 2, 3.0 * MB, "push")]
    assert duration_s(routes, flows, engine) == pytest.approx(4.0)  # type: ignore[arg-type]
    assert duration_s(routes, [Flow(0, 1, 0.0, "push")], engine) == 0.0  # type: ignore[arg-type]
    slow = {"pull": MB / 4}
    # Pulled, the GPU that reads is what limits.
    pulled = [Flow(0, 2, 1.0 * MB, "pull"), Flow(1, 2, 1.0 * MB, "pull")]
    assert duration_s(routes, pulled, slow) == pytest.approx(8.0)  # type: ignore[arg-type]
    apart = [Flow(0, 1, 1.0 * MB, "pull"), Flow(0, 2, 1.0 * MB, "pull")]
    assert duration_s(routes, apart, slow) == pytest.approx(4.0)  # type: ignore[arg-type]


def test_the_shortest_way_is_by_latency() -> None:
    links = (
        Link("gpu0", "switch0", 1.0, 1.0, 1.0),
        Link("switch0", "gpu1", 1.0, 9.0, 1.0),
        Link("switch0", "switch1", 1.0, 1.0, 1.0),
        Link("switch1", "gpu1", 1.0, 1.0, 1.0),
    )
    routes = Routes(Wiring(name="odd", gpus=2, links=links))
    assert routes.of(0, 1) == (("gpu0", "switch0"), ("switch0", "switch1"), ("switch1", "gpu1"))
    assert routes.write_s(0, 1) == 3.0
    with pytest.raises(ValueError, match="no link leads from gpu0 to gpu1 in apart"):
        Routes(Wiring(name="apart", gpus=2, links=links[:1])).of(0, 1)


def test_writes_collapse_where_several_gpus_write_to_several_roots() -> None:
    routes = Routes(Wiring(name="two", gpus=6, links=on_switches(3, 2)))

    def found(*flows: tuple[int, int], way: str = "push") -> set[tuple[str, str]]:
        return set(collapsing(routes, [Flow(source, target, 1.0, way) for source, target in flows]))  # type: ignore[arg-type]

    up = ("switch0", "root0")
    assert found((0, 2), (1, 4)) == {up}
    assert found((0, 2), (1, 2)) == set()
    assert found((0, 2), (0, 4)) == set()
    assert found((0, 2), (1, 4), way="pull") == set()
    assert found((0, 1), (2, 0), (3, 4)) == {("switch1", "root1")}
