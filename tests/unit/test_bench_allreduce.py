"""What follows from measured allreduces: who takes which size, how near to the floor, what to do."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.pcie_allreduce.tuning.choice import MARGIN_RATIO, NCCL, STAY_RATIO, Table, choose, hopeless, winner
from sgdiag.analysis.allreduce.host import (
    SICK_RATIO,
    SMALL_BYTES,
    Host,
    Ill,
    Place,
    ills,
    is_sick,
    nccl_model_us,
    nccl_small_us,
    wiring_of,
)
from sgdiag.analysis.allreduce.measured import Bench, Kept, Key, Sum, best_us, family, in_short
from sgdiag.analysis.allreduce.verdict import (
    best_family,
    crossover,
    floor_us,
    recommend,
    saving_us,
    sizes,
    steps,
    sums_in_words,
    wrong,
)
from sgdiag.analysis.links import published
from sgdiag.analysis.links.predict import latency_s, transfer_s
from sgdiag.analysis.links.published import GEN5_BYTES_PER_S, GPU_WRITE_S, PLX_4, SWITCHTEC_4
from sgdiag.analysis.links.shapes import ONE_SHOT_PUSH, TWO_SHOT_PUSH
from sgdiag.model import Known, Unknown, unknown

TIMES = st.dictionaries(
    st.integers(1, 1 << 22),
    st.dictionaries(st.sampled_from([NCCL, "packet", "flag", "two-flag"]), st.floats(0.5, 1e4), min_size=1),
    max_size=12,
)


@given(TIMES)
def test_a_kernel_is_chosen_only_where_it_was_measured_to_win(times: dict[int, dict[str, float]]) -> None:
    table = choose(times)
    for nbytes, row in times.items():
        name = table.kernel(nbytes)
        if name != NCCL:
            assert row[name] <= MARGIN_RATIO * row[NCCL]
            assert row[name] <= STAY_RATIO * min(us for other, us in row.items() if other != NCCL)


@given(TIMES, st.lists(st.integers(1, 1 << 23), min_size=2, max_size=20))
def test_kernels_have_one_unbroken_range(times: dict[int, dict[str, float]], asked: list[int]) -> None:
    table = choose(times)
    ours = [table.kernel(nbytes) != NCCL for nbytes in sorted(asked)]
    assert sum(a != b for a, b in pairwise(ours)) <= 2
    assert table.kernel(max(times, default=0) + 1) == NCCL


@given(TIMES)
def test_a_table_survives_its_file(times: dict[int, dict[str, float]]) -> None:
    table = choose(times)
    assert Table.from_json(table.as_json()) == table


def test_a_size_between_two_goes_with_the_larger() -> None:
    table = choose({1024: {NCCL: 20, "packet": 5}, 4096: {NCCL: 20, "flag": 9}, 8192: {NCCL: 20, "flag": 19}})
    assert table.steps == ((1024, "packet"), (4096, "flag"))
    assert [table.kernel(nbytes) for nbytes in (16, 1024, 1025, 4096, 4097)] == [
        "packet",
        "packet",
        "flag",
        "flag",
        NCCL,
    ]
    assert table.kernels == ("packet", "flag")
    assert table.largest_bytes == 4096


@given(TIMES, st.integers(1, 1 << 22), st.integers(1, 1 << 22))
def test_a_table_can_be_cut(times: dict[int, dict[str, float]], most: int, nbytes: int) -> None:
    table = choose(times)
    assert table.up_to(most).kernel(nbytes) == (table.kernel(nbytes) if nbytes <= most else NCCL)
    assert Table.from_json(table.up_to(most).as_json()) == table.up_to(most)


def test_small_sizes_may_stay_with_nccl() -> None:
    table = choose({1024: {NCCL: 5, "flag": 6}, 4096: {NCCL: 20, "flag": 9}})
    assert table.steps == ((1024, NCCL), (4096, "flag"))


def test_a_win_behind_a_loss_does_not_count() -> None:
    times = {1: {NCCL: 20, "flag": 9}, 2: {NCCL: 20, "flag": 21}, 4: {NCCL: 20, "flag": 9}}
    assert choose(times).largest_bytes == 1


def test_a_kernel_that_is_about_as_fast_stays() -> None:
    times = {1: {NCCL: 20, "a": 9, "b": 9.1}, 2: {NCCL: 20, "a": 9.3, "b": 9.0}, 4: {NCCL: 20, "a": 9.6, "b": 9.0}}
    assert choose(times).steps == ((2, "a"), (4, "b"))


def test_nothing_is_chosen_without_nccls_time() -> None:
    assert winner({"packet": 1.0}) == NCCL
    assert choose({1024: {"packet": 1.0}}) == Table()


@pytest.mark.parametrize("steps", [None, 3, [[1]], [["many", "flag"]], [[2, "a"], [1, "b"]], [[1, "a"], [1, "b"]]])
def test_a_damaged_table_is_refused(steps: object) -> None:
    with pytest.raises(ValueError, match="table"):
        Table.from_json(steps)


def test_a_kernel_that_falls_behind_twice_is_left_out() -> None:
    times = {1: {NCCL: 10, "a": 21, "b": 21}, 2: {NCCL: 10, "a": 21, "b": 19}}
    assert hopeless(times, ["a", "b", "c"]) == {"a"}
    assert hopeless({1: times[1]}, ["a"]) == set()


def switched(gpus: int = 4, **changed: object) -> Host:
    """GPUs of one switch with a root port."""
    places = tuple(
        Place(
            index=index,
            name="RTX PRO 6000",
            address=f"0000:{3 + index:02x}:00.0",
            chain=("pci0000:00", "0000:00:01.0", "0000:01:00.0", f"0000:02:{index:02x}.0"),
            numa_node=0,
            link_gts=32.0,
            link_lanes=16,
        )
        for index in range(gpus)
    )
    made = Host(gpus=places, levels={}, p2p={})
    pairs = dict.fromkeys(made.pairs)
    usual = {"levels": dict.fromkeys(pairs, "PIX"), "p2p": dict.fromkeys(pairs, "ok"), "registry": Known({}, "procfs")}
    return Host(gpus=places, **{**usual, **changed})  # type: ignore[arg-type]


def direct(gpus: int = 4, sockets: int = 2, **changed: object) -> Host:
    """Each GPU on a root port of its own."""
    made = switched(gpus)
    places = tuple(
        Place(
            index=gpu.index,
            name=gpu.name,
            address=gpu.address,
            chain=(f"pci0000:{gpu.index:02x}", f"0000:{gpu.index:02x}:01.0"),
            numa_node=gpu.index * sockets // gpus,
            link_gts=32.0,
            link_lanes=16,
        )
        for gpu in made.gpus
    )
    usual = {"levels": dict.fromkeys(made.pairs, "SYS"), "p2p": made.p2p, "registry": made.registry}
    return Host(gpus=places, **{**usual, **changed})  # type: ignore[arg-type]


def nvlinked(gpus: int = 2) -> Host:
    made = switched(gpus)
    places = tuple(Place(index=g.index, name="H200", address="", nvlinks=18, nvlink_version=6) for g in made.gpus)
    return Host(gpus=places, p2p=made.p2p, levels=made.levels, nvlinked=made.pairs)


def test_a_switch_is_wired_like_the_published_one() -> None:
    wiring = wiring_of(switched())
    assert isinstance(wiring, Known)
    for shape in (ONE_SHOT_PUSH, TWO_SHOT_PUSH):
        assert latency_s(wiring.value, shape) == pytest.approx(latency_s(SWITCHTEC_4, shape))
        assert transfer_s(wiring.value, shape, 1.0) == pytest.approx(transfer_s(SWITCHTEC_4, shape, 1.0))


def test_sockets_are_joined_and_root_ports_are_apart() -> None:
    wiring = wiring_of(direct())
    assert isinstance(wiring, Known)
    assert len([link for link in wiring.value.links if {link.a, link.b} == {"socket0", "socket1"}]) == 1
    assert latency_s(wiring.value, ONE_SHOT_PUSH) > latency_s(SWITCHTEC_4, ONE_SHOT_PUSH)


def test_slower_slots_are_slower() -> None:
    wiring = wiring_of(switched(gpus=4))
    narrow = switched()
    narrow = Host(
        gpus=tuple(
            Place(index=g.index, name=g.name, address=g.address, chain=g.chain, link_gts=8.0, link_lanes=16)
            for g in narrow.gpus
        )
    )
    slow = wiring_of(narrow)
    assert isinstance(wiring, Known) and isinstance(slow, Known)
    assert transfer_s(slow.value, ONE_SHOT_PUSH, 1.0) == pytest.approx(transfer_s(PLX_4, ONE_SHOT_PUSH, 1.0))
    assert slow.value.gpu_bytes_per_s < GEN5_BYTES_PER_S / 4 + 1


@pytest.mark.parametrize(
    ("chain", "gts", "why"),
    [((), 32.0, "bridges"), (("pci0000:00",), 32.0, "bridges"), (("pci0000:00", "0000:00:01.0"), 64.0, "published")],
)
def test_what_is_not_known_of_the_links_is_said(chain: tuple[str, ...], gts: float, why: str) -> None:
    gpu = Place(index=0, name="GPU", address="", chain=chain, link_gts=gts, link_lanes=16)
    found = wiring_of(Host(gpus=(gpu, gpu)))
    assert isinstance(found, Unknown)
    assert why in found.reason
    assert isinstance(floor_us(Host(gpus=(gpu, gpu)), 1.0, 1024), Unknown)


def test_the_floor_is_launch_latency_and_links() -> None:
    small = floor_us(switched(), 2.0, 16)
    assert isinstance(small, Known)
    assert small.value == pytest.approx(2.0 + 2 * GPU_WRITE_S * 1e6, abs=0.01)
    large = floor_us(switched(), 2.0, 1 << 20)
    assert isinstance(large, Known)
    # Two shots: each GPU sends three quarters of the data twice.
    assert large.value == pytest.approx(
        2.0 + 4 * GPU_WRITE_S * 1e6 + 1.5 * (1 << 20) / GEN5_BYTES_PER_S * 1e6, rel=1e-6
    )
    nvlink = floor_us(nvlinked(), 2.0, 1 << 20)
    assert isinstance(nvlink, Known)
    assert nvlink.value == pytest.approx(2.0 + (1 << 20) / 450e9 * 1e6)


def test_nccls_own_model() -> None:
    assert nccl_model_us(switched(4)) == pytest.approx(12.6)
    assert nccl_model_us(switched(8)) == pytest.approx(20.6)
    assert nccl_model_us(nvlinked(2)) == pytest.approx(7.8)


@pytest.mark.parametrize(
    ("gpus", "us", "sick"), [(4, 14.7, False), (8, 24.2, False), (8, 45.0, True), (8, 57.0, True), (4, 32.0, True)]
)
def test_published_hosts_are_told_apart(gpus: int, us: float, sick: bool) -> None:
    assert is_sick(switched(gpus), us) is sick


def test_a_healthy_host_has_no_ills() -> None:
    assert (
        ills(switched(iommu=Known("identity", "sysfs"), acs=Known({"0000:01:00.0": 0x11}, "sysfs")), {"P2P": 8}) == ()
    )


def test_ills_are_named_with_their_cure() -> None:
    assert "disabled by regkey" in one(switched(p2p={"0-1": "ok", "0-2": "disabled by regkey"})).problem
    assert "1 more" in one(switched(p2p={"0-1": "not supported", "0-2": "not supported"})).problem
    assert one(switched(acs=Known({"0000:02:01.0": 0x1D, "0000:02:02.0": 0x11}, "sysfs"))).cure.startswith(
        "setpci -s 0000:02:01.0 ECAP_ACS+0x6.w=0000"
    )
    assert one(switched(iommu=Known("DMA-FQ", "sysfs"))).cure.startswith("iommu=pt")
    assert one(switched(environment={"NCCL_P2P_DISABLE": "1"})).cure == "unset NCCL_P2P_DISABLE"
    assert one(switched(), {"SHM": 16}).cure == "NCCL_P2P_LEVEL=SYS"
    assert "ForceP2P=0x11" in one(direct(), small_us=240.0).cure


def one(host: Host, transports: dict[str, int] | None = None, small_us: float | None = None) -> Ill:
    (found,) = ills(host, transports or {}, small_us)
    return found


def test_keys_are_not_asked_for_where_they_cannot_be_missing() -> None:
    assert ills(direct(), {}, small_us=14.0) == ()
    assert ills(switched(), {}, small_us=240.0) == ()
    assert ills(direct(registry=unknown("not readable")), {}, small_us=240.0) == ()
    keys = {"ForceP2P": "0x11", "RMForceP2PType": "1", "RMPcieP2PType": "2", "GrdmaPciTopoCheckOverride": "1"}
    found = one(direct(registry=Known(keys, "procfs")), small_us=240.0)
    assert "EnableResizableBar" in found.problem and "RMForceP2PType" not in found.problem


def test_an_iommu_does_not_matter_to_nvlink() -> None:
    made = nvlinked()
    sick = Host(gpus=made.gpus, nvlinked=made.nvlinked, levels=made.levels, p2p=made.p2p, iommu=Known("DMA", "sysfs"))
    assert ills(sick, {}) == ()


def test_sizes_of_decode_and_verify_steps() -> None:
    found = sizes(7168, [1, 4], 4)
    assert [(each.nbytes, each.when) for each in found] == [
        (14336, "decode, batch 1"),
        (57344, "decode, batch 4; verify, batch 1"),
        (229376, "verify, batch 4"),
    ]
    assert len(sizes(7168, [1, 4], 1)) == 2


def bench(times: dict[int, dict[str, float]], **more: object) -> Bench:
    return Bench(gpus=[("GPU", "", "")] * 4, times_us=times, **more)  # type: ignore[arg-type]


WANTED = sizes(512, [1, 8, 64], 1)
SMALL, MIDDLE, LARGE = (each.nbytes for each in WANTED)


def times(**by_name: tuple[float, float, float]) -> dict[int, dict[str, float]]:
    made: dict[int, dict[str, float]] = {SMALL: {}, MIDDLE: {}, LARGE: {}}
    for name, values in by_name.items():
        for nbytes, us in zip(made, values, strict=True):
            made[nbytes][name.replace("_", "-")] = us
    return made


def test_families() -> None:
    assert [family(name) for name in ("nccl", "two-flag", "sglang-v1", "packet")] == [
        "nccl",
        "sgdiag",
        "sglang-v1",
        "sgdiag",
    ]
    assert best_us({"nccl": 9, "flag": 5, "packet": 4}, "sgdiag") == 4
    assert best_us({"nccl": 9}, "sgdiag") is None
    assert bench(times(nccl=(1, 1, 1), flag=(1, 1, 1), sglang_v2=(1, 1, 1))).names == ("nccl", "flag", "sglang-v2")


def test_the_crossover() -> None:
    made = times(nccl=(20, 20, 20), packet=(5, 12, 40), sglang_v1=(21, 21, 21), flashinfer_pcie=(5, 5, 5))
    assert crossover(made, "sgdiag") == (MIDDLE, LARGE)
    assert crossover(made, "sglang-v1") is None
    assert crossover(made, "flashinfer-pcie") == (LARGE, None)
    assert crossover(made, "sglang-v2") is None


def test_what_is_saved_counts_only_where_it_is_worth_it() -> None:
    made = bench(times(nccl=(20, 20, 20), packet=(5, 19, 40)))
    assert saving_us(made, WANTED, "sgdiag") == {SMALL: 15, MIDDLE: 0, LARGE: 0}


def test_who_is_recommended() -> None:
    assert best_family(bench(times(nccl=(20, 20, 20), packet=(19, 19, 19))), WANTED) == "nccl"
    assert best_family(bench(times(nccl=(20, 20, 20), packet=(5, 8, 30))), WANTED) == "sgdiag"
    near = times(nccl=(20, 20, 20), packet=(5.0, 8, 30), flashinfer_pcie=(5.2, 8, 30))
    assert best_family(bench(near), WANTED) == "flashinfer-pcie"
    far = times(nccl=(20, 20, 20), packet=(5.0, 8, 20), sglang_v1=(9, 12, 20))
    assert best_family(bench(far), WANTED) == "sgdiag"


def test_recommendations_are_one_sentence() -> None:
    won = bench(times(nccl=(14, 20, 20), packet=(5, 8, 30)))
    said = recommend(switched(), won, WANTED, ())
    assert said.count(". ") == 0 and said.endswith(".")
    assert "sgdiag apply-fix pcie-allreduce" in said
    assert "up to 8.00 KiB" in said and "saves up to 12.0 us of 20.0 us" in said and "decode, batch 8" in said
    assert recommend(switched(), bench(times(nccl=(14, 15, 16))), WANTED, ()).startswith("Leave allreduces to NCCL")
    assert recommend(switched(), bench({}), WANTED, ()).startswith("Nothing can be recommended")


def test_the_fix_is_not_recommended_where_it_would_stay_off() -> None:
    """SGLang's own custom allreduce runs there."""
    won = times(nccl=(14, 14, 14), packet=(5, 8, 30))
    alone = recommend(nvlinked(), bench(won), WANTED, ())
    assert alone.startswith("Leave SGLang's own custom allreduce on") and "apply-fix" not in alone
    slower = times(nccl=(14, 14, 14), packet=(5, 8, 30), sglang_v1=(9, 9, 12))
    for host in (nvlinked(), switched(2)):
        said = recommend(host, bench(slower), WANTED, ())
        assert "version 1" in said and "apply-fix" not in said
    lost = times(nccl=(14, 14, 14), packet=(5, 8, 30), sglang_v1=(14, 14, 14))
    assert recommend(nvlinked(), bench(lost), WANTED, ()).startswith("Leave allreduces to NCCL")


def test_a_sick_nccl_is_mended_first() -> None:
    won = bench(times(nccl=(200, 200, 500), packet=(5, 8, 30)))
    said = recommend(switched(), won, WANTED, (Ill("no P2P", "iommu=pt"),))
    assert "sick" in said and "iommu=pt" in said and "apply-fix" not in said
    # Where no cause was found there is nothing to mend.
    assert "apply-fix" in recommend(switched(), won, WANTED, ())


def test_tables_in_words() -> None:
    assert steps([(1024, "packet"), (65536, "two-flag")]) == (
        "up to 1.00 KiB: packet",
        "above 1.00 KiB up to 64.0 KiB: two-flag",
        "all larger: nccl",
    )
    assert steps([]) == ("all sizes: nccl",)


def test_wrong_sums_are_said_loudly() -> None:
    right, near, apart = Sum(True, True, 0.0), Sum(False, True, 4e-3), Sum(False, False, 0.5)
    made = bench({}, sums={"nccl": near, "packet": right, "flag": apart})
    assert wrong(made) == ("flag",)
    words = sums_in_words(made)
    assert words[0].endswith("rank order: packet")
    assert any("RANKS GET DIFFERENT SUMS" in line and line.startswith("flag") for line in words)
    assert wrong(bench({}, sums={"nccl": near, "sglang-v1": apart})) == ()


@pytest.mark.parametrize(
    ("status", "cure"),
    [
        ("disabled by regkey", "take the key out of NVreg_RegistryDwords"),
        ("gpu not supported", "GeForce cards have no P2P"),
        ("chipset not supported", "nvidia-smi topo -p2p r"),
    ],
)
def test_missing_p2p_has_a_cure_of_its_own(status: str, cure: str) -> None:
    assert one(switched(p2p={"0-1": status})).cure.startswith(cure)


def test_pairs_without_p2p_are_counted() -> None:
    assert one(switched(p2p={"0-1": "ok", "1-2": "off"})).problem == "no P2P between the GPUs 1-2: off"
    two = one(switched(p2p={"1-2": "off", "0-1": "off", "0-2": "ok"}))
    assert two.problem == "no P2P between the GPUs 0-1 (and 1 more pairs): off"
    # What goes through host memory without P2P needs no word of its own.
    assert one(switched(p2p={"1-2": "off"}), {"SHM": 4}).problem.startswith("no P2P")


def test_every_ill_is_told_with_what_was_seen() -> None:
    mixed = switched(levels={"0-1": "PIX", "0-2": "NODE", "1-2": "PIX"})
    assert one(mixed, {"SHM": 16}).problem == (
        "NCCL goes through host memory (16 connections by SHM) although P2P works (NODE/PIX)"
    )
    assert "although P2P works (?)" in one(switched(levels={}), {"SHM": 1}).problem
    four = {f"0000:02:{port:02x}.0": 0x1D for port in range(4)}
    assert one(switched(acs=Known(four, "sysfs"))).problem.endswith("0000:02:02.0, 0000:02:03.0")
    five = {**four, "0000:02:04.0": 0x1D}
    assert one(switched(acs=Known(five, "sysfs"))).problem.endswith("0000:02:03.0 and 1 more")
    harmful = {"NCCL_P2P_LEVEL": "LOC", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "1"}
    assert [found.cure for found in ills(switched(environment=harmful), {})] == [
        "unset NCCL_P2P_LEVEL",
        "unset NCCL_SHM_DISABLE",
    ]
    assert ills(switched(iommu=Known("identity", "sysfs")), {}) == ()


def test_registry_keys_are_asked_for_by_name() -> None:
    keys = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
    found = one(direct(registry=Known({"ForceP2P": "0x11"}, "procfs")), small_us=240.0)
    assert found.cure.startswith(f'options nvidia NVreg_RegistryDwords="{keys}"')
    assert "ForceP2P=0x11" not in found.problem
    assert found.problem.count(", ") == 4
    assert ills(direct(levels={}), {}, small_us=240.0) == ()
    for level in ("PIX", "PXB"):
        assert ills(direct(levels={"0-1": level, "0-2": "SYS"}), {}, small_us=240.0) == ()


def test_the_shortest_small_time_is_nccls_own() -> None:
    assert nccl_small_us({64: {"nccl": 9.0}, 128: {"nccl": 7.0, "flag": 1.0}, SMALL_BYTES: {"nccl": 6.0}}) == 6.0
    assert nccl_small_us({SMALL_BYTES + 1: {"nccl": 1.0}, 64: {"flag": 1.0}}) is None
    assert is_sick(switched(), None) is False
    assert is_sick(switched(), SICK_RATIO * nccl_model_us(switched())) is False


def test_nvlinks_of_unknown_speed_are_no_links() -> None:
    wiring = wiring_of(nvlinked())
    assert isinstance(wiring, Known)
    assert (wiring.source, wiring.how, wiring.value.gpus, wiring.value.name) == ("nvml", "derived", 2, "2 GPUs here")
    assert [(link.a, link.b, link.write_s, link.read_s) for link in wiring.value.links] == [
        ("gpu0", "switch0", 0.0, 0.0),
        ("gpu1", "switch0", 0.0, 0.0),
    ]
    made = nvlinked()
    odd = msgspec.structs.replace(made.gpus[1], nvlink_version=99)
    assert isinstance(wiring_of(msgspec.structs.replace(made, gpus=(made.gpus[0], odd))), Unknown)
    some = msgspec.structs.replace(made, gpus=switched(3).gpus, nvlinked=("0-1",))
    assert some.joined_by == "PCIe"
    assert Host(gpus=()).joined_by == "PCIe"


def test_one_gpu_of_which_too_little_is_known_hides_the_links() -> None:
    made = switched()
    blind = msgspec.structs.replace(made.gpus[3], chain=("pci0000:00",))
    assert isinstance(wiring_of(msgspec.structs.replace(made, gpus=(*made.gpus[:3], blind))), Unknown)
    newer = msgspec.structs.replace(made.gpus[3], link_gts=64.0)
    assert isinstance(wiring_of(msgspec.structs.replace(made, gpus=(*made.gpus[:3], newer))), Unknown)


def test_links_of_switches_root_ports_and_sockets() -> None:
    wiring = wiring_of(switched(2))
    assert isinstance(wiring, Known)
    assert (wiring.source, wiring.how) == ("sysfs", "derived")
    links = {(link.a, link.b): link for link in wiring.value.links}
    assert set(links) == {
        *(("gpu0", "switch0"), ("gpu1", "switch2"), ("switch0", "switch1"), ("switch2", "switch1")),
        *(("switch1", "root0"), ("root0", "socket0")),
    }
    up, port, gpu = links["switch1", "root0"], links["root0", "socket0"], links["gpu0", "switch0"]
    assert (gpu.write_s, gpu.read_s) == (published.GPU_WRITE_S, published.GPU_READ_S)
    assert (links["switch0", "switch1"].write_s, links["switch0", "switch1"].read_s) == (0.0, 0.0)
    assert up.write_s == published.UPLINK_WRITE_S - published.ROOT_WRITE_S
    assert up.read_s == published.UPLINK_READ_S - published.ROOT_READ_S
    assert (port.write_s, port.read_s) == (published.ROOT_WRITE_S, published.ROOT_READ_S)


def test_a_kept_benchmark_in_short() -> None:
    def kept(table: list[tuple[int, str]], times_us: dict[int, dict[str, float]]) -> Kept:
        return Kept(Key([("GPU", "GPU-0", "a"), ("GPU", "GPU-1", "b")]), made_at=5.0, table=table, times_us=times_us)

    made = {
        1024: {"nccl": 20.0, "packet": 12.0, "flag": 5.0, "sglang-v1": 1.0},
        2048: {"nccl": 30.0, "packet": 10.0},
        4096: {"nccl": 90.0, "packet": 10.0},
        512: {"packet": 1.0},
        256: {"nccl": 99.0, "sglang-v1": 1.0},
    }
    short = in_short(kept([(1024, "flag"), (2048, "packet"), (9999, "nccl")], made))
    assert (short.at, short.gpus, short.last_bytes, short.saved_us) == (5.0, ("GPU-0", "GPU-1"), 2048, 20.0)
    none = in_short(kept([(9999, "nccl")], made))
    assert (none.last_bytes, none.saved_us) == (0, 0.0)


def test_sums_in_words() -> None:
    found = {
        "packet": Sum(exact=True, alike=True, worst_error_ratio=0.0),
        "flag": Sum(exact=True, alike=True, worst_error_ratio=0.0),
        "nccl": Sum(exact=False, alike=True, worst_error_ratio=3e-3),
        "two-flag": Sum(exact=True, alike=False, worst_error_ratio=0.5),
        "sglang-v1": Sum(exact=False, alike=False, worst_error_ratio=0.25),
    }
    made = bench({}, sums=found)
    assert sums_in_words(made) == (
        "bit for bit the fp32 sum in rank order: packet, flag",
        "nccl: off by up to 3.0e-03 of the summands' magnitudes",
        "two-flag: RANKS GET DIFFERENT SUMS (off by up to 5.0e-01)",
        "sglang-v1: RANKS GET DIFFERENT SUMS (off by up to 2.5e-01)",
    )
    assert wrong(made) == ("two-flag",)
    inexact = bench({}, sums={"flag": Sum(exact=False, alike=True, worst_error_ratio=0.1)})
    assert wrong(inexact) == ("flag",)


def test_verify_steps_with_one_draft_token_are_decode_steps() -> None:
    assert [each.when for each in sizes(8, [2], 1)] == ["decode, batch 2"]
    assert [(each.nbytes, each.when) for each in sizes(8, [2], 2)] == [
        (32, "decode, batch 2"),
        (64, "verify, batch 2"),
    ]


def test_a_tie_is_no_win() -> None:
    assert crossover(times(nccl=(5, 5, 5), packet=(5, 5, 5)), "sgdiag") is None
    # What is a tenth faster counts, and what is only nearly so does not.
    edge = bench(times(nccl=(10, 10, 10), packet=(9, 9.1, 9)))
    assert saving_us(edge, WANTED, "sgdiag") == {SMALL: 1, MIDDLE: 0, LARGE: 1}
