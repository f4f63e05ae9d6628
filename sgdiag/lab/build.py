"""Build what a lab server runs on: a base environment, one overlay per release, and model folders.

Every step has a recipe; its hash is written to a stamp only when the step is finished. A run that was killed resumes at
the first step without a matching stamp, and a run with nothing to do reads a few stamps and returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sgdiag.lab import home
from sgdiag.lab.errors import LabError
from sgdiag.lab.releases import BASE_PACKAGES, PYTHON, TORCH, Release

Progress = Callable[[str], None]

BUILD_LIMIT_S = 3600.0
LOCK_LIMIT_S = 3600.0
BASE_FREE_BYTES = 6 << 30
OVERLAY_FREE_BYTES = 1 << 30
_MAKE_MODELS = Path(__file__).with_name("make_models.py")
# A caller's habits that would put packages elsewhere or find them elsewhere.
_DROPPED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")
_PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")


def recipe_hash(*parts: object) -> str:
    """Hex digest of anything JSON can hold; equal recipes give equal digests, in any process."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def base_steps() -> tuple[tuple[str, str], ...]:
    """Name and recipe hash of the base environment's steps; each hash covers the steps before it."""
    venv = recipe_hash("venv", PYTHON)
    torch = recipe_hash(venv, TORCH)
    packages = recipe_hash(torch, BASE_PACKAGES)
    return (("venv", venv), ("torch", torch), ("packages", packages))


def overlay_hash(release: Release) -> str:
    """Recipe hash of one release's overlay; the base's packages do not enter, because nothing of them is copied."""
    return recipe_hash("overlay", PYTHON, release.overlay)


def model_key(layers: int, accept: float, seed: int) -> str:
    """Folder name of one pair of models; `accept` counts in hundredths."""
    return f"layers{layers}-accept{round(accept * 100):03d}-seed{seed}"


def environment(release: Release, progress: Progress) -> None:
    """Make the base environment and the release's overlay unless they are there; LabError says what failed."""
    # Before the lock, because another release being built is no reason to wait.
    if is_built(release):
        return
    with locked("environments", progress):
        _build_base(progress)
        _build_overlay(release, progress)


def models(layers: int, accept: float, seed: int, progress: Progress) -> Path:
    """Folder with `target`, `draft` and `expected_next.json`; made by the base environment unless it is there."""
    recipe = recipe_hash("models", _MAKE_MODELS.read_text(), layers, round(accept, 2), seed)
    folder = home.models_dir() / model_key(layers, accept, seed)
    if _is_done(folder / "stamp", recipe):
        return folder
    with locked("models", progress):
        if _is_done(folder / "stamp", recipe):
            return folder
        progress(f"models: {folder.name}")
        beside = folder.with_name(folder.name + ".new")
        _remove(beside)
        arguments = ["--layers", str(layers), "--accept", str(round(accept, 2)), "--seed", str(seed)]
        _run("models", [str(home.base_python()), str(_MAKE_MODELS), str(beside), *arguments], 300.0)
        _write_stamp(beside / "stamp", recipe)
        _replace(beside, folder)
    return folder


def is_built(release: Release) -> bool:
    """Whether environment() has nothing to do."""
    base = home.base_dir()
    return all(_is_done(base / f"stamp-{name}", recipe) for name, recipe in base_steps()) and _is_done(
        home.overlay_dir(release.version) / "stamp", overlay_hash(release)
    )


@contextlib.contextmanager
def locked(name: str, progress: Progress, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Hold the lab's lock of that name; waits for another holder up to the limit. The kernel frees it if we die."""
    path = home.home() / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}; set SGDIAG_LAB_HOME to a folder you own") from None
    with handle:
        end = time.monotonic() + limit_s
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise LabError(f"another process holds {path} for {limit_s:.0f} s; end it and try again") from None
                if not waiting:
                    progress(f"{name}: waiting for another sgdiag to finish")
                waiting = True
                time.sleep(0.2)
        yield


def _build_base(progress: Progress) -> None:
    base = home.base_dir()
    python = str(home.base_python())
    commands: dict[str, Callable[[], None]] = {
        "venv": lambda: _make_venv(base),
        "torch": lambda: _run("base-torch", [python, "-m", "pip", "install", *_PIP_OPTIONS, TORCH]),
        "packages": lambda: _run(
            "base-packages", [python, "-m", "pip", "install", *_PIP_OPTIONS, TORCH, *BASE_PACKAGES]
        ),
    }
    notes = {
        "venv": f"a virtual environment of {PYTHON}",
        "torch": TORCH,
        "packages": f"{len(BASE_PACKAGES)} packages",
    }
    for number, (name, recipe) in enumerate(base_steps(), 1):
        stamp = base / f"stamp-{name}"
        if _is_done(stamp, recipe):
            continue
        _need_free(BASE_FREE_BYTES if name != "packages" else OVERLAY_FREE_BYTES)
        progress(f"base {number}/3: {notes[name]}")
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        commands[name]()
        _write_stamp(stamp, recipe)
        progress(f"base {number}/3: done in {time.monotonic() - started:.0f} s")


def _build_overlay(release: Release, progress: Progress) -> None:
    folder = home.overlay_dir(release.version)
    recipe = overlay_hash(release)
    if _is_done(folder / "stamp", recipe):
        return
    _need_free(OVERLAY_FREE_BYTES)
    progress(f"overlay {release.version}: {', '.join(release.overlay)}")
    started = time.monotonic()
    beside = folder.with_name(folder.name + ".new")
    _remove(beside)
    python = str(home.base_python())
    target = ["--no-deps", "--target", str(beside)]
    _run(f"overlay-{release.version}", [python, "-m", "pip", "install", *_PIP_OPTIONS, *target, *release.overlay])
    _write_stamp(beside / "stamp", recipe)
    _replace(beside, folder)
    progress(f"overlay {release.version}: done in {time.monotonic() - started:.0f} s")


def _make_venv(folder: Path) -> None:
    _remove(folder)
    _run("base-venv", [_find_python(), "-m", "venv", str(folder)], 300.0)


def _find_python() -> str:
    """The first interpreter on PATH of the right name that can make an environment with pip in it."""
    seen = []
    for folder in os.get_exec_path():
        candidate = Path(folder) / PYTHON
        if not os.access(candidate, os.X_OK):
            continue
        seen.append(str(candidate))
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # A version manager's stand-in may be there without the version behind it, Debian's without ensurepip.
            probe = subprocess.run(
                [str(candidate), "-c", "import ensurepip, venv"], capture_output=True, timeout=30, check=False
            )
            if probe.returncode == 0:
                return str(candidate)
    if seen:
        raise LabError(f"{seen[0]} cannot make environments; install its venv module ({PYTHON}-venv on Debian)")
    raise LabError(f"no {PYTHON} on PATH; install it, the lab's SGLang releases run on that version")


def _run(step: str, command: Sequence[str], limit_s: float = BUILD_LIMIT_S) -> None:
    """Run one build command, output to a log file; LabError with the log's path and its last telling line."""
    log = home.logs_dir() / f"{step}.log"
    env = {key: value for key, value in os.environ.items() if key not in _DROPPED_VARIABLES} | {"PIP_USER": "0"}
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                timeout=limit_s,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        raise LabError(f"step {step} did not end within {limit_s:.0f} s; see {log}, then run it again") from None
    except OSError as error:
        raise LabError(f"step {step} could not run: {error.strerror} ({error.filename}); see {log}") from None
    if code != 0:
        raise LabError(failure(step, code, log.read_text(errors="replace"), log))


def failure(step: str, code: int, output: str, log: Path) -> str:
    """One line about a failed build command: what it said last that matters, where the rest is, what to do."""
    if "No space left on device" in output:
        return f"step {step} ran out of disk space under {home.home()}; free some or set SGDIAG_LAB_HOME (log: {log})"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("ERROR") or "Error" in line] or lines or ["no output"]
    return (
        f"step {step} failed with exit code {code}: {telling[-1][:300]} (log: {log}); run the command again to resume"
    )


def _need_free(wanted_bytes: int) -> None:
    folder = home.home()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < wanted_bytes:
        raise LabError(
            f"{free / 2**30:.1f} GiB free under {folder}, {wanted_bytes / 2**30:.0f} GiB needed; "
            "free some or set SGDIAG_LAB_HOME to a larger disk"
        )


def _is_done(stamp: Path, recipe: str) -> bool:
    try:
        return stamp.read_text().strip() == recipe
    except OSError:
        return False


def _write_stamp(stamp: Path, recipe: str) -> None:
    beside = stamp.with_name(stamp.name + ".tmp")
    beside.write_text(recipe + "\n")
    beside.replace(stamp)


def _replace(beside: Path, folder: Path) -> None:
    """Put a finished folder in place; a crash in between leaves no folder, which reads as not built."""
    old = folder.with_name(folder.name + ".old")
    _remove(old)
    if folder.exists():
        folder.rename(old)
    beside.rename(folder)
    _remove(old)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
