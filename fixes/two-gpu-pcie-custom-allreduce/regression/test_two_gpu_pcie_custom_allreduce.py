"""The variable selects the version of custom allreduce that works without NVLink. Run by `sgdiag verify-fix`.

What a machine without two PCIe GPUs can show: which class SGLang's own dispatch takes, and that the second version
switches itself off where its check finds no NVLink, while the first one goes on to its set-up.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(os.environ["SGDIAG_FIX_ROOT"])
PYTHON = os.environ["SGDIAG_FIX_PYTHON"]
VARIABLE = "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"

CHOSEN = """
from unittest.mock import MagicMock, patch
import torch
from sglang.srt.distributed.device_communicators import custom_all_reduce as first

with patch.object(first, "_is_cuda", True):
    chosen = first.dispatch_custom_allreduce()
print("chosen", chosen.__name__)
if chosen.__name__ == "CustomAllReduceV2":
    from sglang.srt.distributed.device_communicators import custom_all_reduce_v2 as home
else:
    home = first

class Reached(Exception):
    pass

# False is what SGLang's check returns for two GPUs with P2P and without NVLink.
with (
    patch.object(home, "can_use_custom_all_reduce_with_nvlink", return_value=False),
    patch.object(first, "ops", MagicMock(IS_CUSTOM_AR_AVAILABLE=True)),
    patch.object(first.dist, "get_backend", return_value="gloo"),
    patch.object(first.dist, "get_rank", return_value=0),
    patch.object(first.dist, "get_world_size", return_value=2),
    patch.object(first.CustomAllreduce, "create_shared_buffer", side_effect=Reached),
):
    try:
        print("disabled", chosen(group=MagicMock(), device=torch.device("cuda:0")).disabled)
    except Reached:
        print("disabled False")
"""


def chosen(value: str | None) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if value is not None:
        environment[VARIABLE] = value
    ran = subprocess.run(
        [PYTHON, "-c", CHOSEN], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    lines = [line.split() for line in ran.stdout.splitlines()]
    told = {words[0]: words[1] for words in lines if len(words) == 2 and words[0] in ("chosen", "disabled")}
    assert len(told) == 2, ran.stderr[-2000:]
    return told


def test_without_the_variable_custom_allreduce_is_off() -> None:
    assert chosen(None) == {"chosen": "CustomAllReduceV2", "disabled": "True"}


@pytest.mark.parametrize("value", ["0", "false"])
def test_with_it_the_first_version_is_taken_and_stays_on(value: str) -> None:
    assert chosen(value) == {"chosen": "CustomAllreduce", "disabled": "False"}
