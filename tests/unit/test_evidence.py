"""What rules have in common: which GPUs are the server's, and how to say that something is not known."""

from __future__ import annotations

from sgdiag.model import Evidence, Gpu, Gpus, Known, Log, Process, Snapshot, unknown
from sgdiag.rules.evidence import cannot_tell, explain_log, gpus_of


def with_gpus(*used: int) -> Snapshot:
    """A host with three GPUs, and a server whose process uses some of them."""
    process = Process(pid=1, gpus=Known(used, "nvml")) if used else Process(pid=1)
    return Snapshot(processes=(process,), gpus=Gpus(devices=tuple(Gpu(index=index) for index in range(3))))


def test_the_servers_gpus_are_those_that_its_processes_use() -> None:
    assert [gpu.index for gpu in gpus_of(with_gpus(0, 2))] == [0, 2]
    assert [gpu.index for gpu in gpus_of(with_gpus())] == [0, 1, 2]


def test_what_cannot_be_told_has_the_reason_as_evidence() -> None:
    told = cannot_tell("some-id", "it works", "a fact", unknown("nobody says so"))
    assert (told.verdict, told.title) == ("UNKNOWN", "cannot tell whether it works")
    assert told.evidence == (Evidence("unknown", "nobody says so"),)
    assert cannot_tell("some-id", "it works", "a fact").evidence == ()


def test_the_log_to_explain_is_the_servers_or_a_process_own() -> None:
    process = Process(pid=1, log_path=Known("/logs/of process.log", "procfs"))
    (advice,) = explain_log(Snapshot(processes=(process,)), "says why")
    assert advice.command == "sgdiag explain '/logs/of process.log'"
    (advice,) = explain_log(Snapshot(processes=(process,), log=Log(path=Known("/logs/own.log", "--log"))), "says why")
    assert advice.command == "sgdiag explain /logs/own.log"
    assert explain_log(Snapshot(), "says why") == ()
