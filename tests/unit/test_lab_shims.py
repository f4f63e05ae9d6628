"""The stand-ins on a lab server's PYTHONPATH, as far as they need no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sgdiag.lab import home


def run(code: str, path: str = "", **env: str) -> str:
    """What the code prints in an interpreter that has the shims in front."""
    python_path = os.pathsep.join(filter(None, (str(home.shims_dir()), path)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": python_path, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("from torchvision.transforms import InterpolationMode as x; x = x.BICUBIC", "bicubic"),
        ("from torchvision.transforms.functional import InterpolationMode as x; x = x.BOX", "box"),
        ("from torchvision.transforms.v2 import functional as f; x = f.resize", "None"),
        ("import torchvision.transforms.v2.functional as f; x = f.pil_to_tensor", "None"),
        ("from torchvision.transforms import Normalize as x", "<class 'object'>"),
        ("from torchvision import transforms as t; x = t.v2.Resize if hasattr(t, 'v2') else 0", "<class 'object'>"),
        ("from torchvision.io import decode_jpeg as x", "None"),
    ],
)
def test_torchvision_imports(statement: str, value: str) -> None:
    assert run(f"{statement}; print(x)") == value


def test_only_the_named_modules_are_stood_in_for() -> None:
    code = "import torchvision\ntry:\n    import torchvision.models\nexcept ImportError:\n    print('none')"
    assert run(code) == "none"


def test_the_plugin_is_found_and_harmless_without_the_module_it_changes() -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "points = entry_points(group='sglang.srt.plugins')\n"
        "[point.load()() for point in points]\n"
        "print([point.name for point in points])"
    )
    assert run(code) == "['sgdiag_lab']"


def test_a_process_hangs_with_all_its_threads_where_asked_for() -> None:
    code = (
        "import os, signal, threading, time\n"
        "threading.Thread(target=lambda: [time.sleep(0.05) or print('tick', flush=True) for _ in range(200)]).start()\n"
        "time.sleep(0.3)\n"
        "print('hangs', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(home.shims_dir()), "SGDIAG_LAB_SHIMS": "hang"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as process:
        time.sleep(1.5)
        process.kill()
        assert process.stdout is not None
        words = process.stdout.read().split()
    assert "tick" in words
    assert len(words) - words.index("hangs") <= 2


@pytest.mark.parametrize(("shims", "value"), [("streams,tree", "True"), ("", "False")])
def test_modules_are_changed_only_where_asked_for(tmp_path: Path, shims: str, value: str) -> None:
    module = tmp_path / "sglang" / "srt" / "speculative" / "spec_utils.py"
    module.parent.mkdir(parents=True)
    module.write_text("_is_cuda = False\n")
    code = "import sglang.srt.speculative.spec_utils as module; print(module._is_cuda)"
    assert run(code, str(tmp_path), SGDIAG_LAB_SHIMS=shims) == value
