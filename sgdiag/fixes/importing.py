"""Do changed modules still import, in the interpreter that the server will use?"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import PurePosixPath

from sgdiag.fixes.installation import Installation
from sgdiag.sources.installed import WITHOUT_CURRENT_FOLDER

TIMEOUT_S = 300.0

_IMPORT = f"""
{WITHOUT_CURRENT_FOLDER}
import importlib, importlib.util, os
root, *names = sys.argv[1:]
spec = importlib.util.find_spec("sglang")
if spec is None or not spec.origin or os.path.realpath(os.path.dirname(os.path.dirname(spec.origin))) != root:
    sys.path.insert(0, root)
for name in names:
    importlib.import_module(name)
"""


def modules(paths: Iterable[str]) -> tuple[str, ...]:
    """The modules behind changed files."""
    code = (PurePosixPath(path).with_suffix("") for path in paths if path.endswith(".py"))
    return tuple(sorted(".".join(path.parts).removesuffix(".__init__") for path in code))


def why_not_importable(installation: Installation, names: Iterable[str]) -> str:
    """The last line of what Python says when it imports ``names``; empty where all is well.

    The interpreter runs at the lowest priority, since servers may be at work beside it.
    """
    try:
        ran = subprocess.run(
            ["nice", "-n", "19", installation.python, "-c", _IMPORT, str(installation.root), *names],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {TIMEOUT_S:.0f} s"
    except OSError as error:
        return str(error)
    if ran.returncode == 0:
        return ""
    said = [line for line in ran.stderr.splitlines() if line.strip()]
    return said[-1] if said else f"exit status {ran.returncode}"
