"""What the commands print with `--json`; `--json-schema` prints these as JSON Schema."""

from __future__ import annotations

import msgspec

from sgdiag.analysis.allreduce.host import Host
from sgdiag.analysis.allreduce.measured import Bench
from sgdiag.analysis.hangs import Group, Stance, Verdict
from sgdiag.analysis.kv import budget, plan, whatif
from sgdiag.analysis.leftovers import Plan, Survey
from sgdiag.model import Fact, Finding
from sgdiag.session.doctor import Examination
from sgdiag.session.objects import RankLines
from sgdiag.session.reap import Report
from sgdiag.sources.model_plan import Flags


class Findings(msgspec.Struct, frozen=True):
    """`sgdiag check` and `sgdiag explain`: the worst, or the most telling, first."""

    findings: tuple[Finding, ...]


class Examinations(msgspec.Struct, frozen=True):
    """`sgdiag doctor`: one for each server."""

    examinations: tuple[Examination, ...]


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """`sgdiag kv`: one budget, and one outcome of the changed flags, for each rank."""

    budgets: tuple[budget.Budget, ...]
    what_if: tuple[whatif.Outcome, ...]
    slot_bytes_by_config: Fact[int]


class Changed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one changed flag would make of a plan, or why nothing would come of it."""

    flag: str
    plan: plan.Plan | None = None
    problem: str = ""


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`sgdiag kv --model`; ``model`` is the folder of the model's files."""

    model: str
    release: str
    gpu_memory_bytes: int
    flags: Flags
    plan: plan.Plan
    what_if: tuple[Changed, ...]


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """`sgdiag stacks`: one look, at unix time ``at``; ``groups`` are the ranks by stack, the odd one out first."""

    at: float
    verdict: Verdict
    ranks: tuple[Stance, ...]
    groups: tuple[Group, ...]


class Cure(msgspec.Struct, frozen=True):
    """Something that slows NCCL down, and the cure: a command, a setting, or words."""

    problem: str
    cure: str


class Message(msgspec.Struct, frozen=True):
    """A message of ``nbytes``, and the batch of the decode or verify step that sends it; 0 where there is none."""

    nbytes: int
    decode: int
    verify: int


class Nccl(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's connections by transport, the time of a small allreduce by its own model and as measured, and what ails
    it."""

    transports: dict[str, int]
    model_us: float
    small_us: float | None
    sick: bool
    ills: tuple[Cure, ...]


class Allreduce(msgspec.Struct, frozen=True, kw_only=True):
    """`sgdiag bench-allreduce`. ``floor_us`` is the least time that the links allow, by size in bytes.

    ``crossover_bytes``: by name, the last size at which it is faster than NCCL, and the next measured one.
    """

    host: Host
    nccl: Nccl
    bench: Bench | None
    floor_us: dict[int, float]
    wanted: tuple[Message, ...]
    problem: str
    crossover_bytes: dict[str, tuple[int, int | None] | None] = {}
    recommendation: str = ""


class Objects(msgspec.Struct, frozen=True):
    """`sgdiag objects`: one look, at unix time ``at``. What JSON lacks stands as an object with one telling key, such
    as ``{"float": "nan"}``, ``{"int": "0x20000000000001"}`` or ``{"tensor": {…}}``."""

    at: float
    ranks: tuple[RankLines, ...]


class Processes(msgspec.Struct, frozen=True):
    """`sgdiag processes`; with --reap also what would be done, and a report if it was."""

    survey: Survey
    plan: Plan | msgspec.UnsetType = msgspec.UNSET
    report: Report | msgspec.UnsetType | None = msgspec.UNSET
