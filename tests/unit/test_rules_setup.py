"""Rules about how a server was set up: arguments, environment, driver, toolkit, packages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import (
    Collectives,
    Communicator,
    Finding,
    Gpu,
    Gpus,
    GraphSet,
    Known,
    KvPool,
    Rank,
    RankId,
    Server,
    Snapshot,
    Speculation,
    unknown,
)
from sgdiag.releases.processes import Launch
from sgdiag.rules import evaluate
from sgdiag.sources.cmdline import read_command_line


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def find(snapshot: Snapshot, finding_id: str) -> Finding | None:
    return next((finding for finding in evaluate(snapshot) if finding.id == finding_id), None)


def asked(words: str) -> Known[dict[str, str]]:
    """What a command line asks for, read as the process source reads it."""
    fact = read_command_line(Launch(tuple(words.split()))).server.asked
    assert isinstance(fact, Known)
    return fact


def changed(words: str, *ranks: Rank, graphs: tuple[int, ...] = (), adaptive: bool = False, **args: Any) -> list[str]:
    """Evidence of arguments that were changed."""
    dp = args.pop("dp", 1)
    snapshot = Snapshot(
        server=Server(
            asked=asked(words), args=known(args), dp_size=known(dp), device=known(args.pop("device", "cuda"))
        ),
        ranks=ranks,
        speculation=Speculation(adaptive=known(adaptive)),
        graphs=(GraphSet(name="target decode", sizes=known(graphs)),) if graphs else (),
    )
    finding = find(snapshot, "server-argument-changed")
    return [item.text for item in finding.evidence] if finding is not None else []


@pytest.mark.parametrize(
    ("words", "args", "text"),
    [
        ("--page-size 1", {"page_size": 64}, "--page-size 1 was given, 64 runs"),
        ("--attention-backend fa3", {"attention_backend": "triton"}, "--attention-backend fa3 was given, triton runs"),
        (
            "--mem-fraction-static 0.9",
            {"mem_fraction_static": 0.765},
            "--mem-fraction-static 0.9 was given, 0.765 runs",
        ),
        (
            "--speculative-num-steps 4 --speculative-num-draft-tokens 24",
            {"speculative_num_steps": 4, "speculative_num_draft_tokens": 5},
            "--speculative-num-draft-tokens 24 was given, 5 runs",
        ),
        ("--chunked-prefill-size 4096", {"chunked_prefill_size": -1}, "--chunked-prefill-size 4096 was given, -1 runs"),
        ("--enable-mixed-chunk", {"enable_mixed_chunk": False}, "--enable-mixed-chunk was given, and it is off"),
        ("", {"disable_radix_cache": True}, "--disable-radix-cache was not given, and is set"),
        ("", {"disable_overlap_schedule": True}, "--disable-overlap-schedule was not given, and is set"),
        ("", {"disable_cuda_graph": True}, "--disable-cuda-graph was not given, and is set"),
    ],
)
def test_a_changed_argument_shows_both_values(words: str, args: dict[str, Any], text: str) -> None:
    assert changed(words, **args) == [text]


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("--page-size 64", {"page_size": 64}),
        ("", {"page_size": 64, "attention_backend": "fa3", "disable_radix_cache": False}),
        ("--mem-fraction-static 0.8424", {"mem_fraction_static": 0.842}),
        ("--mem-fraction-static .9", {"mem_fraction_static": 0.9}),
        ("--attention-backend nsa", {"attention_backend": "dsa"}),
        ("--kv-cache-dtype bf16", {"kv_cache_dtype": "bfloat16"}),
        ("--kv-cache-dtype auto", {"kv_cache_dtype": "fp8_e4m3"}),
        ("--disable-radix-cache", {"disable_radix_cache": True}),
        ("--config server.yaml", {"disable_radix_cache": True}),
        ("--cuda-graph-backend-decode disabled", {"disable_cuda_graph": True}),
        ("--chunked-prefill-size 8192", {"chunked_prefill_size": 1024, "dp": 8}),
        ("--page-size 64", {}),
    ],
)
def test_what_is_no_change(words: str, args: dict[str, Any]) -> None:
    assert changed(words, **args) == []


def test_a_cpu_server_has_no_graphs_to_switch_off() -> None:
    assert changed("", disable_cuda_graph=True, device="cpu") == []


def test_adaptive_speculation_changes_its_own_steps() -> None:
    assert changed("--speculative-num-steps 3", adaptive=True, speculative_num_steps=1) == []


def test_capacities_below_what_was_asked_for() -> None:
    rank = Rank(
        id=RankId(),
        max_running_requests=known(12),
        kv=KvPool(capacity_tokens=known(40_000), page_size_tokens=known(64)),
    )
    assert changed("--max-total-tokens 90000 --max-running-requests 64", rank, dp=2) == [
        "DP0 TP0: --max-total-tokens asked for 89,984, 40,000 runs",
        "DP0 TP0: --max-running-requests asked for 32, 12 runs",
    ]
    assert changed("--max-total-tokens 40007 --max-running-requests 24", rank, dp=2) == []


def test_a_pool_without_pages_is_not_rounded() -> None:
    rank = Rank(id=RankId(), kv=KvPool(capacity_tokens=known(40_000)))
    assert changed("--max-total-tokens 40001", rank) == ["TP0: --max-total-tokens asked for 40,001, 40,000 runs"]


def test_graphs_are_not_missed_above_the_running_limit() -> None:
    rank = Rank(id=RankId(), max_running_requests=known(16))
    assert changed("--cuda-graph-max-bs 256", rank, graphs=(1, 8, 16)) == []
    assert changed("--cuda-graph-max-bs 256", rank, graphs=(1, 8)) == [
        "target decode: --cuda-graph-max-bs asked for 16, 8 runs"
    ]
    assert changed("--cuda-graph-max-bs 256", rank, graphs=(1, 8), speculative_disable_batch_threshold=8) == []


def test_every_changed_argument_is_told_with_what_it_means() -> None:
    snapshot = Snapshot(
        server=Server(
            asked=asked("--page-size 1 --speculative-num-steps 4 --prefill-attention-backend fa3"),
            args=known(
                {"page_size": 64, "speculative_num_steps": 1, "prefill_attention_backend": "triton"},
            ),
        )
    )
    finding = find(snapshot, "server-argument-changed")
    assert finding is not None
    assert finding.evidence[0].source == f"{asked('').source} / test"
    assert [cause.partition(":")[0] for cause in finding.cause.split("; ")] == [
        "--prefill-attention-backend",
        "--page-size",
        "--speculative-num-steps",
    ]
    # Two of the three have no effect of their own to tell of.
    assert finding.advice[1].effect.startswith("until then: prefixes are shared in whole pages only")
    assert "; " not in finding.advice[1].effect
    silent = find(
        Snapshot(server=Server(asked=asked("--speculative-num-steps 4"), args=known({"speculative_num_steps": 1}))),
        "server-argument-changed",
    )
    assert silent is not None
    assert silent.advice[1].effect == ""


@pytest.mark.parametrize(
    ("words", "args", "found"),
    [
        # What is not judged hides nothing that comes after it.
        (
            "--chunked-prefill-size 4096 --speculative-num-steps 3 --speculative-eagle-topk 4",
            {"chunked_prefill_size": 4096, "speculative_num_steps": 1, "speculative_eagle_topk": 1},
            ["--speculative-num-steps 3 was given, 1 runs", "--speculative-eagle-topk 4 was given, 1 runs"],
        ),
        (
            "--chunked-prefill-size 8192 --speculative-num-steps 3",
            {"chunked_prefill_size": 1024, "speculative_num_steps": 1, "dp": 8},
            ["--speculative-num-steps 3 was given, 1 runs"],
        ),
        # An odd size is divided into whole tokens.
        ("--chunked-prefill-size 8193", {"chunked_prefill_size": 4096, "dp": 2}, []),
        (
            "--chunked-prefill-size 8192",
            {"chunked_prefill_size": 4096},
            ["--chunked-prefill-size 8192 was given, 4096 runs"],
        ),
        # SGLang rounds to three digits.
        (
            "--mem-fraction-static 0.850",
            {"mem_fraction_static": 0.851},
            ["--mem-fraction-static 0.850 was given, 0.851 runs"],
        ),
        ("", {"disable_custom_all_reduce": True}, ["--disable-custom-all-reduce was not given, and is set"]),
        ("", {"disable_custom_all_reduce": True, "device": "cpu"}, []),
        ("--disable-custom-all-reduce", {"disable_custom_all_reduce": True}, []),
        ("--enable-mixed-chunk", {"enable_mixed_chunk": True}, []),
        (
            "--enable-mixed-chunk --config a.yaml",
            {"enable_mixed_chunk": False},
            ["--enable-mixed-chunk was given, and it is off"],
        ),
        ("", {"disable_cuda_graph": False, "disable_radix_cache": None}, []),
    ],
)
def test_changes_one_by_one(words: str, args: dict[str, Any], found: list[str]) -> None:
    assert changed(words, **args) == found


def test_adaptive_speculation_hides_no_other_change() -> None:
    args: dict[str, Any] = {"speculative_num_steps": 1, "page_size": 64}
    assert changed("--page-size 1 --speculative-num-steps 3", adaptive=True, **args) == [
        "--page-size 1 was given, 64 runs"
    ]


def test_the_rank_with_the_least_decides_and_ranks_without_a_pool_do_not() -> None:
    ranks = (
        Rank(id=RankId(tp=0), kv=KvPool(capacity_tokens=known(50_000))),
        Rank(id=RankId(tp=1), kv=KvPool(capacity_tokens=known(40_000))),
        Rank(id=RankId(tp=2)),
    )
    assert changed("--max-total-tokens 60000", *ranks) == ["TP1: --max-total-tokens asked for 60,000, 40,000 runs"]
    assert changed("--max-total-tokens 60000", Rank(id=RankId(), kv=KvPool(capacity_tokens=known(0)))) == []
    assert changed("--max-total-tokens 60000", Rank(id=RankId(), kv=KvPool(capacity_tokens=known(1)))) == [
        "TP0: --max-total-tokens asked for 60,000, 1 runs"
    ]
    assert changed("--max-running-requests 33", Rank(id=RankId(), max_running_requests=known(16)), dp=2) == []
    assert changed("--cuda-graph-max-bs 8", graphs=(1, 8)) == []
    assert changed("--max-running-requests 16", Rank(id=RankId())) == []


@given(
    st.lists(st.sampled_from(["--page-size", "=", "9" * 40, "-1", "--max-total-tokens", "x", "--config"]), max_size=8)
)
def test_odd_command_lines_do_no_harm(words: list[str]) -> None:
    rank = Rank(id=RankId(), kv=KvPool(capacity_tokens=known(0)))
    changed(" ".join(words), rank, page_size=1)


def environment(variables: dict[str, str], **more: Any) -> list[str]:
    """What is wrong with these variables."""
    interfaces = more.get("interfaces")
    snapshot = Snapshot(
        collectives=Collectives(
            environment=known(variables),
            interfaces=known(interfaces) if interfaces is not None else unknown("not read"),
            communicators=(Communicator(group="tp", custom_allreduce=known(more.get("custom", "absent"))),),
        ),
        gpus=Gpus(devices=tuple(Gpu(index=0, nvlinks_up=known(more["links"])) for _ in range("links" in more))),
    )
    finding = find(snapshot, "nccl-environment-wrong")
    return [item.text for item in finding.evidence] if finding is not None else []


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NCCL_P2P_DISABLE": "true"}, "NCCL_P2P_DISABLE=true counts as 0"),
        ({"NCCL_BUFFSIZE": "4M"}, "NCCL_BUFFSIZE=4M counts as 4"),
        ({"NCCL_P2P_LEVEL": "NODE"}, "NCCL_P2P_LEVEL=NODE is none of"),
        ({"NCCL_LL128_BUFFSIZE": "131072"}, "is no multiple of 120"),
        ({"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "4"}, "NCCL_MIN_NCHANNELS=8 is above NCCL_MAX_NCHANNELS=4"),
        ({"NCCL_MAX_NCHANNELS": "0"}, "NCCL_MAX_NCHANNELS=0"),
        ({"NCCL_BUFFSIZE": "-1"}, "is no size"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker"}, "only NCCL knows exclusions"),
    ],
)
def test_a_variable_that_is_not_understood(variables: dict[str, str], text: str) -> None:
    found = environment(variables)
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NCCL_BUFFSIZE": "131072", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "2"},
        {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"},
        {"NCCL_BUFFSIZE": "0x400000", "NCCL_LL128_BUFFSIZE": "122880"},
        {"NCCL_P2P_LEVEL": "phb", "NCCL_SOCKET_IFNAME": "^lo,docker"},
        {"NCCL_P2P_LEVEL": "PXN", "NCCL_SOCKET_IFNAME": "eth0:4000"},
        {"NCCL_P2P_LEVEL": "3", "NCCL_DEBUG": "INFO", "NCCL_ALGO": "allreduce:tree"},
        {"NCCL_IB_DISABLE": "false", "NCCL_P2P_DISABLE": ""},
        {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},
    ],
)
def test_a_variable_that_makes_sense(variables: dict[str, str]) -> None:
    assert environment(variables, interfaces=("lo", "eth0"), links=0) == []


@pytest.mark.parametrize(
    ("variables", "found", "command"),
    [
        ({"NCCL_P2P_DISABLE": "Yes"}, "NCCL_P2P_DISABLE=Yes counts as 0: it does not", "NCCL_P2P_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "on"}, "NCCL_P2P_DISABLE=on counts as 0: it does not", "NCCL_P2P_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "2x"}, "NCCL_P2P_DISABLE=2x counts as 2", "unset NCCL_P2P_DISABLE"),
        ({"NCCL_BUFFSIZE": "true"}, "NCCL_BUFFSIZE=true counts as 0", "unset NCCL_BUFFSIZE"),
        ({"NCCL_BUFFSIZE": "0x10M"}, "NCCL_BUFFSIZE=0x10M counts as 16", "unset NCCL_BUFFSIZE"),
        ({"NCCL_BUFFSIZE": "0X10M"}, "NCCL_BUFFSIZE=0X10M counts as 16", "unset NCCL_BUFFSIZE"),
        ({"NCCL_BUFFSIZE": "off"}, "NCCL_BUFFSIZE=off counts as 0", "unset NCCL_BUFFSIZE"),
        ({"NCCL_P2P_LEVEL": "NODE"}, "NCCL_P2P_LEVEL=NODE is none of LOC, NVL", "NCCL_P2P_LEVEL=SYS"),
        ({"NCCL_LL_BUFFSIZE": "0"}, "NCCL_LL_BUFFSIZE=0 is no size", "unset NCCL_LL_BUFFSIZE"),
        ({"NCCL_LL128_BUFFSIZE": "100"}, "NCCL_LL128_BUFFSIZE=100 is no multiple", "NCCL_LL128_BUFFSIZE=120"),
        ({"NCCL_LL128_BUFFSIZE": "245760001"}, "NCCL_LL128_BUFFSIZE=245760001", "NCCL_LL128_BUFFSIZE=125829120"),
        (
            {"NCCL_MAX_NCHANNELS": "0", "NCCL_MIN_NCHANNELS": "4"},
            "NCCL_MAX_NCHANNELS=0: NCCL takes 1",
            "unset NCCL_MAX_NCHANNELS",
        ),
        (
            {"NCCL_MAX_NCHANNELS": "1", "NCCL_MIN_NCHANNELS": "2"},
            "NCCL_MIN_NCHANNELS=2 is above NCCL_MAX_NCHANNELS=1",
            "NCCL_MIN_NCHANNELS=1",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "=eth0"},
            "GLOO_SOCKET_IFNAME==eth0: only NCCL knows exclusions",
            "GLOO_SOCKET_IFNAME=INTERFACE",
        ),
    ],
)
def test_a_variable_that_is_not_understood_is_told_with_what_to_set(
    variables: dict[str, str], found: str, command: str
) -> None:
    finding = find(Snapshot(collectives=Collectives(environment=known(variables))), "nccl-environment-wrong")
    assert finding is not None
    assert [item.text[: len(found)] for item in finding.evidence] == [found]
    assert [advice.command for advice in finding.advice] == [command]


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_P2P_DISABLE": "No", "NCCL_IB_DISABLE": "off"},
        {"NCCL_LL128_BUFFSIZE": "0", "NCCL_BUFFSIZE": "1", "NCCL_LL_BUFFSIZE": "1"},
        {"NCCL_LL128_BUFFSIZE": "-7"},
        {"NCCL_MAX_NCHANNELS": "1", "NCCL_MIN_NCHANNELS": "1"},
        {"NCCL_MIN_NCHANNELS": "64"},
        {"NCCL_P2P_DISABLE": "0"},
    ],
)
def test_more_variables_that_make_sense(variables: dict[str, str]) -> None:
    assert environment(variables, custom="on") == []


def test_a_variable_that_is_not_judged_hides_no_other() -> None:
    variables = {"NCCL_IB_DISABLE": "false", "NCCL_NVLS_ENABLE": "", "NCCL_P2P_DISABLE": "true"}
    assert environment(variables) == ["NCCL_P2P_DISABLE=true counts as 0: it does not switch anything on"]


def test_the_interface_that_is_proposed_is_one_that_others_can_reach() -> None:
    def proposed(*names: str) -> str:
        snapshot = Snapshot(
            collectives=Collectives(environment=known({"GLOO_SOCKET_IFNAME": "^lo"}), interfaces=known(names))
        )
        finding = find(snapshot, "nccl-environment-wrong")
        assert finding is not None
        return finding.advice[0].command

    assert proposed("lo", "docker0", "veth12", "br-7f", "ens5", "eth0") == "GLOO_SOCKET_IFNAME=ens5"
    assert proposed("lo") == "GLOO_SOCKET_IFNAME=INTERFACE"


def test_an_interface_that_the_process_does_not_see() -> None:
    here = ("lo", "docker0", "ens5")
    assert environment({"NCCL_SOCKET_IFNAME": "eth0,ib0"}, interfaces=here) == [
        "NCCL_SOCKET_IFNAME=eth0,ib0 fits none of lo, docker0, ens5"
    ]
    assert environment({"NCCL_SOCKET_IFNAME": "ens"}, interfaces=here) == []
    assert len(environment({"NCCL_SOCKET_IFNAME": "=ens"}, interfaces=here)) == 1
    assert len(environment({"GLOO_SOCKET_IFNAME": "ens"}, interfaces=here)) == 1
    assert environment({"GLOO_SOCKET_IFNAME": "ens5"}, interfaces=here) == []
    assert environment({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}) == []
    assert environment({"NCCL_SOCKET_IFNAME": "ib0,ens5,"}, interfaces=here) == []
    assert environment({"NCCL_SOCKET_IFNAME": "=ens5:4000"}, interfaces=here) == []
    assert environment({"GLOO_SOCKET_IFNAME": "ens5,ib0"}, interfaces=here) == [
        "GLOO_SOCKET_IFNAME=ens5,ib0: the process sees lo, docker0, ens5 only"
    ]


def test_settings_that_the_machine_contradicts() -> None:
    assert len(environment({"NCCL_P2P_DISABLE": "1"}, custom="on")) == 1
    assert environment({"NCCL_P2P_DISABLE": "1"}) == []
    assert len(environment({"NCCL_NVLS_ENABLE": "1"}, links=0)) == 1
    assert environment({"NCCL_NVLS_ENABLE": "1"}, links=18) == []
    assert environment({"NCCL_NVLS_ENABLE": "1"}) == []
    assert environment({"NCCL_NVLS_ENABLE": "2"}, links=0) == []
    assert len(environment({"NCCL_P2P_DISABLE": "2"}, custom="on")) == 1


@given(st.dictionaries(st.sampled_from(["NCCL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_P2P_LEVEL"]), st.text()))
def test_any_value_of_a_variable_is_judged(variables: dict[str, str]) -> None:
    assert len(environment(variables)) <= 2 * len(variables)


def expandable(health: str = "starting", release: str = "0.5.9", links: int = 0, **more: Any) -> Finding | None:
    variables = {more.get("name", "PYTORCH_CUDA_ALLOC_CONF"): more.get("value", "expandable_segments:True")}
    variables |= more.get("variables", {})
    snapshot = Snapshot(
        server=Server(
            tp_size=known(more.get("tp", 2)),
            health=known(health),
            release=known(release),
            args=known(more.get("args", {})),
        ),
        collectives=Collectives(environment=known(variables)),
        gpus=Gpus(devices=(Gpu(index=0, nvlinks_up=known(links)),)),
    )
    return find(snapshot, "expandable-segments-custom-allreduce")


def test_expandable_segments_with_custom_allreduce() -> None:
    finding = expandable()
    assert finding is not None
    assert finding.family == "custom-allreduce"
    assert finding.advice[0].command == "unset PYTORCH_CUDA_ALLOC_CONF"
    assert expandable(release="0.5.20", links=0) is not None
    assert expandable(name="PYTORCH_ALLOC_CONF", value="max_split_size_mb:64, expandable_segments:true") is not None
    assert expandable(release="0.5.20", links=4, variables={"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}) is not None


def test_expandable_segments_that_do_no_harm() -> None:
    assert expandable(health="up") is None
    assert expandable(release="0.5.20", links=4) is None
    assert expandable(value="expandable_segments:False") is None
    assert expandable(tp=1) is None
    assert expandable(args={"disable_custom_all_reduce": True}) is None
    assert expandable(tp=1, health="down") is None


@pytest.mark.parametrize(
    ("groups", "warned"),
    [
        ((Communicator(group="tp", custom_allreduce=known("on")),), True),
        ((Communicator(group="tp", custom_allreduce=known("disabled")),), False),
        ((Communicator(group="world", custom_allreduce=known("not asked for")),), True),
        ((Communicator(group="tp", custom_allreduce=unknown("not read")),), True),
    ],
)
def test_expandable_segments_where_custom_allreduce_runs(groups: tuple[Communicator, ...], warned: bool) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    snapshot = Snapshot(
        server=Server(tp_size=known(2)), collectives=Collectives(environment=known(variables), communicators=groups)
    )
    assert (find(snapshot, "expandable-segments-custom-allreduce") is not None) is warned


@pytest.mark.parametrize(
    ("release", "links", "switch", "warned"),
    [
        ("0.5.13", 4, None, True),
        ("0.5.14", 4, None, False),
        ("0.5.14", None, None, False),
        ("0.5.14", 0, None, True),
        ("0.5.14", 4, "1", False),
        ("0.5.14", 4, "0", True),
        ("0.5.14", 4, "False", True),
    ],
)
def test_the_second_version_of_custom_allreduce_shares_such_memory(
    release: str, links: int | None, switch: str | None, warned: bool
) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if switch is not None:
        variables["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] = switch
    gpus = () if links is None else (Gpu(index=0, nvlinks_up=known(links)), Gpu(index=1, nvlinks_up=known(links)))
    snapshot = Snapshot(
        server=Server(tp_size=known(2), release=known(release)),
        collectives=Collectives(environment=known(variables)),
        gpus=Gpus(devices=gpus),
    )
    assert (find(snapshot, "expandable-segments-custom-allreduce") is not None) is warned


def machine(capability: str = "12.0", health: str = "starting", **facts: Any) -> Snapshot:
    told = {name: known(facts[name]) for name in ("packages", "pinned", "torch_cuda", "cuda_toolkit") if name in facts}
    return Snapshot(
        server=Server(health=known(health), device=known("cuda"), **told),
        gpus=Gpus(
            driver=known("570.1"),
            driver_cuda=known(facts["driver_cuda"]) if "driver_cuda" in facts else unknown("no driver"),
            devices=(Gpu(index=0, compute_capability=known(capability)),),
        ),
    )


@pytest.mark.parametrize(
    ("capability", "torch", "fits"),
    [
        ("12.0", "12.6", False),
        ("12.0", "12.8", True),
        ("12.1", "12.8", True),
        ("10.3", "12.8", True),
        ("10.0", "12.4", False),
        ("9.0", "12.4", True),
        ("8.9", "11.8", True),
        ("12.0", "13.0", True),
        ("99.0", "12.4", True),
    ],
)
def test_torch_and_the_gpu(capability: str, torch: str, fits: bool) -> None:
    finding = find(machine(capability, torch_cuda=torch), "torch-not-built-for-gpu")
    assert (finding is None) is fits
    assert finding is None or (finding.verdict == "FAIL" and finding.family == "sm120-or-shared-memory-limit")


def test_a_server_that_serves_is_no_proof_against_its_own_torch() -> None:
    finding = find(machine("12.0", "up", torch_cuda="12.4"), "torch-not-built-for-gpu")
    assert finding is not None
    assert finding.verdict == "WARN"
    assert finding.confidence < 0.8


def test_driver_and_torch() -> None:
    def verdict(driver: str, torch: str, health: str = "starting") -> str:
        finding = find(machine(health=health, driver_cuda=driver, torch_cuda=torch), "driver-older-than-torch")
        return finding.verdict if finding is not None else ""

    assert verdict("12.8", "13.0") == "FAIL"
    assert verdict("12.4", "12.8") == "WARN"
    assert verdict("13.0", "12.8") == ""
    assert verdict("12.8", "12.8") == ""
    assert verdict("12.8", "13.0", "up") == ""


@pytest.mark.parametrize(("torch", "cause"), [("13.0", "its own major CUDA version"), ("12.9", "compiled to PTX")])
def test_within_a_major_version_only_ptx_fails_on_an_older_driver(torch: str, cause: str) -> None:
    finding = find(machine(health="starting", driver_cuda="12.8", torch_cuda=torch), "driver-older-than-torch")
    assert finding is not None
    assert cause in finding.cause


def test_toolkit_gpu_and_torch() -> None:
    old = find(machine("12.0", cuda_toolkit="12.4", torch_cuda="12.8"), "cuda-toolkit-unfit")
    assert old is not None
    assert old.advice[0].command == "CUDA_HOME=/usr/local/cuda-12.8"
    assert find(machine("12.1", cuda_toolkit="12.8", torch_cuda="12.8"), "cuda-toolkit-unfit") is not None
    other_major = find(machine("9.0", cuda_toolkit="12.8", torch_cuda="13.0"), "cuda-toolkit-unfit")
    assert other_major is not None
    assert "13.0" in other_major.advice[0].command
    assert find(machine("12.0", cuda_toolkit="12.9", torch_cuda="12.8"), "cuda-toolkit-unfit") is None
    assert find(machine("12.0", cuda_toolkit="12.9"), "cuda-toolkit-unfit") is None
    assert find(machine("12.0", torch_cuda="12.8"), "cuda-toolkit-unfit") is None


def test_packages_and_the_release() -> None:
    good = {"torch": "2.9.1+cu128", "sgl-kernel": "0.3.21", "flashinfer-python": "0.6.3", "flashinfer-cubin": "0.6.3"}
    pins = {"torch": "2.9.1", "sgl-kernel": "0.3.21", "flashinfer-python": "0.6.3", "flashinfer-cubin": "0.6.3"}
    assert find(machine(packages=good, pinned=pins), "packages-unlike-release") is None
    assert find(machine(packages={"torch": "2.9.1"}, pinned=pins), "packages-unlike-release") is None
    other = find(machine(packages=good | {"sgl-kernel": "0.3.20"}, pinned=pins), "packages-unlike-release")
    assert other is not None
    assert other.advice[0].command == "pip install sgl-kernel==0.3.21"
    apart = find(machine(packages=good | {"flashinfer-jit-cache": "0.6.1+cu128"}), "packages-unlike-release")
    assert apart is not None
    assert "FlashInfer's packages differ" in apart.evidence[0].text
    assert "flashinfer-jit-cache==0.6.3" in apart.advice[0].command
    # The build of CUDA in a pin does not count, that of what is installed is shown.
    assert (
        find(machine(packages={"torch": "2.9.1"}, pinned={"torch": "2.9.1+cu128"}), "packages-unlike-release") is None
    )
    pair = find(
        machine(packages={"flashinfer-cubin": "0.6.3", "flashinfer-jit-cache": "0.6.1"}), "packages-unlike-release"
    )
    assert pair is not None
    assert pair.evidence[0].text.endswith("flashinfer-cubin 0.6.3, flashinfer-jit-cache 0.6.1")
    assert pair.advice[0].command == "pip install flashinfer-cubin==0.6.3 flashinfer-jit-cache==0.6.1"


def test_the_newest_cuda_that_a_gpu_needs_is_asked_for() -> None:
    gpus = tuple(Gpu(index=index, compute_capability=known(text)) for index, text in enumerate(("12.1", "12.0", "8.9")))
    old = Snapshot(server=Server(torch_cuda=known("11.0"), cuda_toolkit=known("11.0")), gpus=Gpus(devices=gpus))
    torch = find(old, "torch-not-built-for-gpu")
    assert torch is not None
    assert "CUDA 12.8 or newer" in torch.cause
    assert len(torch.evidence) == 3
    toolkit = find(old, "cuda-toolkit-unfit")
    assert toolkit is not None
    assert toolkit.advice[0].command == "CUDA_HOME=/usr/local/cuda-12.9"


def test_versions_that_cannot_be_read_accuse_nobody() -> None:
    assert find(machine("9.0", cuda_toolkit="custom", torch_cuda="12.8"), "cuda-toolkit-unfit") is None
    assert find(machine("9.0", cuda_toolkit="12.8", torch_cuda="?"), "cuda-toolkit-unfit") is None
    assert find(machine(driver_cuda="?", torch_cuda="12.8"), "driver-older-than-torch") is None
    assert find(machine(driver_cuda="12.8", torch_cuda="?"), "driver-older-than-torch") is None


def test_a_server_without_a_gpu_needs_no_toolkit_and_no_kernels() -> None:
    snapshot = machine("12.0", cuda_toolkit="12.4", torch_cuda="13.0", packages={"torch": "2"}, pinned={"torch": "3"})
    assert find(snapshot, "cuda-toolkit-unfit") is not None
    assert find(snapshot, "packages-unlike-release") is not None
    cpu = msgspec.structs.replace(snapshot, server=msgspec.structs.replace(snapshot.server, device=known("cpu")))
    assert find(cpu, "cuda-toolkit-unfit") is None
    assert find(cpu, "packages-unlike-release") is None
