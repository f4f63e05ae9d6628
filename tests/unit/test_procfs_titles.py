from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import RankId
from sgdiag.releases.processes import (
    Title,
    is_resource_tracker,
    local_ranks,
    parse_launch,
    parse_title,
    role_of_comm,
    settings,
    shown_environment,
)
from sgdiag.releases.secrets import HIDDEN, redact_command


@pytest.mark.parametrize(
    ("title", "meaning"),
    [
        ("sglang::scheduler", Title("scheduler", RankId())),
        ("sglang::scheduler_TP3", Title("scheduler", RankId(tp=3))),
        ("sglang::scheduler_DP1_PP2_ATTN_CP3_MOE_DP4_TP5_EP6", Title("scheduler", RankId(dp=1, pp=2, tp=5))),
        ("sglang::scheduler_MOE_DP4_TP1", Title("scheduler", RankId(tp=1))),
        ("sglang::scheduler_DP0", Title("scheduler", RankId())),
        ("sglang::scheduler_XY7_TP1", Title("scheduler")),
        ("sglang::detokenizer", Title("detokenizer")),
        ("sglang::detokenizer_router", Title("detokenizer-router")),
        ("sglang::data_parallel_controller", Title("dp-controller")),
        ("sglang::tokenizer_worker:4711", Title("tokenizer-worker")),
        ("sglang::tokenizer_worker", None),
        ("sglang::scheduler.py", None),
        ("sglang::scheduler_notes", None),
        ("vi sglang::scheduler", None),
        ("xsglang::scheduler", None),
        ("sgl_diffusion::scheduler_TP0", None),
        ("", None),
    ],
)
def test_titles(title: str, meaning: Title | None) -> None:
    assert parse_title(title) == meaning


@given(st.text(max_size=60))
def test_any_suffix_is_understood_or_refused(text: str) -> None:
    parse_title("sglang::scheduler" + text)


def test_what_the_kernel_keeps_of_a_title() -> None:
    assert role_of_comm("sglang::schedul") == "scheduler"
    assert role_of_comm("sglang::data_pa") == "dp-controller"
    assert role_of_comm("sglang::sched") is None


PYTHON = "/opt/env/bin/python3.12"


@pytest.mark.parametrize(
    "argv",
    [
        (PYTHON, "-m", "sglang.launch_server", "--port", "1"),
        ("python", "-u", "-m", "sglang.launch_server", "--port", "1"),
        ("python3", "-um", "sglang.launch_server", "--port", "1"),
        ("python3", "-msglang.launch_server", "--port", "1"),
        ("python3", "-X", "faulthandler", "-W", "ignore", "-m", "sglang.launch_server", "--port", "1"),
        ("python3", "-Xdev", "-Wignore", "-m", "sglang.launch_server", "--port", "1"),
        (PYTHON, "/src/python/sglang/launch_server.py", "--port", "1"),
        (PYTHON, "/opt/env/bin/sglang", "serve", "--port", "1"),
        (PYTHON, "-m", "sglang.cli.main", "serve", "--port", "1"),
        ("sglang", "serve", "--port", "1"),
    ],
)
def test_launchers(argv: tuple[str, ...]) -> None:
    launch = parse_launch(argv)
    assert launch is not None
    assert launch.args == ("--port", "1")


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("",),
        ("python",),
        ("python", "-m"),
        ("vim", "sglang/launch_server.py"),
        ("bash", "-c", "python -m sglang.launch_server --port 1"),
        ("docker", "run", "image", "python", "-m", "sglang.launch_server"),
        ("py-spy", "record", "--", "python", "-m", "sglang.launch_server"),
        ("grep", "sglang.launch_server"),
        ("python", "-c", "import sglang.launch_server"),
        ("python", "-m", "pytest", "-m", "sglang.launch_server"),
        ("python", "-m", "sglang.bench_serving"),
        ("python", "/opt/env/bin/sglang", "version"),
        ("python", "-m", "sglang.launch_server_not"),
        ("sglang", "generate"),
        ("pythonista", "-m", "sglang.launch_server"),
        ("python", "-m", "sgdiag", "attach", "sglang"),
    ],
)
def test_what_is_no_launcher(argv: tuple[str, ...]) -> None:
    assert parse_launch(argv) is None


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_command_line_is_taken_apart_without_error(argv: list[str]) -> None:
    parse_launch(argv)
    parse_launch(["python", *argv])
    settings(argv)
    assert len(redact_command(argv)) == len(argv)


def test_serve_takes_the_model_as_its_first_word() -> None:
    launch = parse_launch(("python", "/bin/sglang", "serve", "org/model", "--tp", "2"))
    assert launch is not None
    assert settings(launch.args) == {"model_path": "org/model", "tp_size": "2"}


def test_the_resource_tracker() -> None:
    spawned = (
        "python",
        "-B",
        "-c",
        "from multiprocessing.spawn import spawn_main; spawn_main(x)",
        "--multiprocessing-fork",
    )
    assert is_resource_tracker(("python", "-B", "-c", "from multiprocessing.resource_tracker import main;main(6)"))
    assert not is_resource_tracker(spawned)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--tp 2", {"tp_size": "2"}),
        ("--tp-size=4", {"tp_size": "4"}),
        ("--tensor-parallel-size 8", {"tp_size": "8"}),
        ("--tp 2 --tp 4", {"tp_size": "4"}),
        ("--dp 2 --pp-size 3 --ep 4", {"dp_size": "2", "pp_size": "3", "ep_size": "4"}),
        ("--attn-dp-size 2", {"attn_dp_size": "2"}),
        ("--model m --model-impl auto", {"model_path": "m"}),
        ("--mem-fraction 0.8", {"mem_fraction_static": "0.8"}),
        ("--enable-dp-attention --port 7", {"enable_dp_attention": "true", "port": "7"}),
        ("--enable-metrics-for-all-schedulers", {}),
        ("--config a.yaml", {"config": "a.yaml"}),
        ("--chunked-prefill-size -1", {"chunked_prefill_size": "-1"}),
        ("--port", {"port": ""}),
        ("-tp 2", {}),
    ],
)
def test_settings(words: str, found: dict[str, str]) -> None:
    assert settings(words.split()) == found


def test_secrets_never_leave() -> None:
    words = "python --api-key {} --admin-api-key={} --ssl-keyfile /k.pem --ssl-keyfile-password {}"
    shown = redact_command(words.format("sk-1", "sk-2", "pw").split())
    assert " ".join(shown) == words.format(HIDDEN, HIDDEN, HIDDEN)
    environment = shown_environment(
        {
            "SGLANG_API_KEY": "sk-3",
            "NCCL_DEBUG": "INFO",
            "PATH": "/bin",
            "AWS_SECRET": "s",
            "SGLANG_URL": "http://u:p@h/x",
        }
    )
    assert environment == {"NCCL_DEBUG": "INFO", "SGLANG_API_KEY": HIDDEN, "SGLANG_URL": f"http://{HIDDEN}@h/x"}


def test_hosts_share_the_ranks_of_a_stage() -> None:
    here, elsewhere = local_ranks(tp_size=4, pp_size=1, nnodes=2, node_rank=1)
    assert here == {(0, 2), (0, 3)}
    assert elsewhere == {(0, 0), (0, 1)}


def test_hosts_share_the_stages_first() -> None:
    here, _ = local_ranks(tp_size=2, pp_size=4, nnodes=2, node_rank=1)
    assert here == {(2, 0), (2, 1), (3, 0), (3, 1)}


@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
def test_every_rank_lives_on_exactly_one_host(tp_power: int, pp_power: int, nodes_power: int) -> None:
    tp_size, pp_size = 2**tp_power, 2**pp_power
    nnodes = min(2**nodes_power, tp_size * pp_size)
    hosts = [local_ranks(tp_size=tp_size, pp_size=pp_size, nnodes=nnodes, node_rank=rank)[0] for rank in range(nnodes)]
    assert sorted(place for host in hosts for place in host) == sorted(
        (pp, tp) for pp in range(pp_size) for tp in range(tp_size)
    )
