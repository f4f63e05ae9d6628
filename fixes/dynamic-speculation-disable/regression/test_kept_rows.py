"""What plain steps leave for the draft model is found again, also where graphs store it. Run by `sgdiag verify-fix`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from test_dynamic_speculation_disable import HAS_LAB, LAB_RELEASE, ROOT, WHERE_STEPS_ARE_KEPT

from sgdiag.lab import home


@WHERE_STEPS_ARE_KEPT
def test_what_was_kept_is_what_the_draft_model_reads() -> None:
    python = os.environ.get("SGDIAG_FIX_PYTHON", "")
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if HAS_LAB:
        python, path = str(home.base_python()), [*path, str(home.overlay_dir(LAB_RELEASE)), str(home.shims_dir())]
    ran = subprocess.run(
        [python, str(Path(__file__).with_name("kept_rows.py"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["wrong"] == 0
    assert found["right"] > 10_000
    assert found["read at once"] == []
    assert found["read like accepted drafts"] == []
    assert found["held"] == 0
