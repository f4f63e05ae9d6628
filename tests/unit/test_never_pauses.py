"""A server that is looked at is neither paused nor signalled."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import sgdiag
from sgdiag.remote import Execute, Group, Reader
from tests.remote_targets.harness import pythons, running

PACKAGE = Path(sgdiag.__file__).parent

SIGNALS = {"kill", "killpg", "send_signal", "pidfd_send_signal", "terminate"}
MAY_SIGNAL = {
    "session/reap.py",  # what --reap ends
    "remote/calibrate.py",  # its own child
    "sources/allreduce_bench.py",  # its own child
}


def test_its_state_and_tracer_stay_as_they_are_while_it_is_read() -> None:
    with running(pythons()[0], "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("state", reader.find_local("serve", "state"))
        group = Group(["state.items", "state.items[2]"])
        seen: set[tuple[str, str]] = set()
        reads = 0

        def watch() -> None:
            while not done.is_set():
                status = dict(
                    line.split(":", 1) for line in Path(f"/proc/{target.pid}/status").read_text().splitlines()
                )
                seen.add((status["State"].split()[0], status["TracerPid"].strip()))

        done = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(300):
                reads += any(result.has_value for result in reader.read(group).results.values())
        finally:
            done.set()
            watcher.join()
    assert reads > 250
    assert seen
    assert {tracer for _, tracer in seen} == {"0"}
    assert not {state for state, _ in seen} & {"T", "t"}


def test_signals_are_sent_from_a_few_places_only() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        place = str(path.relative_to(PACKAGE))
        if names & SIGNALS and not place.startswith("lab/"):
            found.add(place)
    assert found == MAY_SIGNAL
