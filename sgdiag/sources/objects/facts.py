"""From observations to the facts of the model, by field; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sgdiag.model import NO_BATCH, Fact, Known, Unknown, combine, unknown
from sgdiag.model.units import GIB
from sgdiag.releases.objects import BACKENDS, EAGER, GROUPS, NOT_WANTED, VERIFY_MODE, Entry, Schema
from sgdiag.remote import Status, Tensor
from sgdiag.sources.objects.fields import fitted, value_type
from sgdiag.sources.objects.observation import Observation, explained, origin
from sgdiag.sources.objects.scheduler import BATCHES

Seen = Mapping[str, Observation]
Facts = dict[str, Fact[Any]]

_TORN = "torn: it changed while it was read"
_DOES_NOT_SPECULATE = unknown("the server does not speculate")
_NOT_READ = unknown("not read yet")
_NO_GRAPHS = unknown("no graphs are captured")

_SHARED = ("kv.free_pages", "kv.release_pages", "cache.evictable", "cache.protected")
"""Entries that account for the same pool; only one consistent read may be added up."""


def facts(schema: Schema, seen: Seen, batches: Seen) -> Facts:
    """Every field of the model that the observations say something about, known or not.

    What is told of batches comes from ``batches``, where each batch is of one read; all the rest from ``seen``.
    """
    found: Facts = {}
    classes = _classes(seen)
    for entry in _captured_first(schema):
        for field in entry.fields:
            one = (batches if _is_of_batch(field) else seen).get(entry.name)
            if one is not None and not field.startswith("rank.id."):
                _put(found, field, _if_counted(entry.name, _for_field(field, one, classes), seen))
    found |= _pool(seen, found, classes)
    for batch in BATCHES:
        if f"batch.{batch}.spec" in batches:
            found |= _spec_shapes(batches, batch)
    found |= _communicators(seen)
    _speculation(found, seen)
    _decode_rate(found)
    found = _graphs(found, seen)
    return found if schema.standing == "checked" else {field: _assumed(fact, schema) for field, fact in found.items()}


def _assumed(fact: Fact[Any], schema: Schema) -> Fact[Any]:
    """A value found where another release has it may be something else."""
    if isinstance(fact, Unknown):
        return fact
    return Known(fact.value, f"{fact.source} (as in {schema.base})", "assumed", fact.at)


def value(seen: Seen, name: str) -> Any:
    """An entry's value; None where it is None, not known or not read."""
    one = seen.get(name)
    return one.fact.or_else(None) if one is not None else None


def _captured_first(schema: Schema) -> list[Entry]:
    # What was asked for on the command line counts only where nothing tells what came of it.
    return sorted(schema.entries.values(), key=lambda entry: entry.name.startswith("args."))


def _classes(seen: Seen) -> set[object]:
    return {one.fact.or_else(None) for one in seen.values() if one.entry.read == "class"}


def _put(found: Facts, field: str, fact: Fact[Any]) -> None:
    before = found.get(field)
    if isinstance(before, Known) and isinstance(fact, Known) and isinstance(fact.value, dict):
        total = {name: before.value.get(name, 0) + fact.value.get(name, 0) for name in {**before.value, **fact.value}}
        found[field] = Known(total, f"{before.source} + {fact.source}", before.how, before.at)
    elif not isinstance(before, Known) and (before is None or isinstance(fact, Known)):
        found[field] = fact


def _is_of_batch(field: str) -> bool:
    return field.startswith("rank.batches[")


def _for_field(field: str, one: Observation, classes: set[object]) -> Fact[Any]:
    if _is_of_batch(field) and one.status is Status.RELAXED:
        return unknown(_TORN)
    if _is_of_batch(field) and one.is_none_on_the_way():
        return NO_BATCH
    return fitted(field, _converted(field, one.entry, explained(one.entry, one.fact, classes)))


def _converted(field: str, entry: Entry, fact: Fact[Any]) -> Fact[Any]:
    """In the field's unit and form."""
    if isinstance(fact, Unknown):
        return fact
    content = fact.value
    if entry.read == "class":
        if value_type(field) is bool:
            return msgspec.structs.replace(fact, value=content not in (None, EAGER))
        name = "None" if content is None and field.endswith("spec_info_type") else BACKENDS.get(content, content)
        return _given(fact, name)
    if content is None:
        return _given(fact, None)
    change = _CHANGES.get(field)
    if change is not None:
        content = change(content)
    elif isinstance(content, Tensor):
        content = content.shape
    elif entry.read == "tensors":
        content = content[0].shape if content else None
    elif entry.unit == "GiB":
        content = {k: _bytes(v) for k, v in content.items()} if isinstance(content, dict) else _bytes(content)
    return _given(fact, content)


def _given(fact: Known[Any], content: object) -> Fact[Any]:
    return unknown(f"{fact.source.removeprefix('object:')} is None") if content is None else _with(fact, content)


def _with(fact: Known[Any], content: object) -> Known[Any]:
    return msgspec.structs.replace(fact, value=content)


def _bytes(gib: object) -> object:
    # Memory that others gave back meanwhile makes a small use come out below zero.
    return max(0, round(gib * GIB)) if isinstance(gib, (int, float)) else gib


def _nccl_version(raw: object) -> object:
    """NCCL's own number (22703) as people write it (2.27.3)."""
    if not isinstance(raw, int):
        return raw
    return f"{raw // 10000}.{raw // 100 % 100}.{raw % 100}"


_CHANGES: dict[str, Callable[[Any], object]] = {
    "collectives.nccl_version": _nccl_version,
    "speculation.algorithm": lambda name: "none" if name == "NONE" else name,
}


# --- what takes more than one entry


def _pool(seen: Seen, found: Facts, classes: set[object]) -> Facts:
    """The pool's account: all of it from one consistent read, or unknown."""
    if "kv.free_pages" not in seen:
        return {}
    torn = next((name for name in _SHARED if name in seen and seen[name].status in (Status.RELAXED, Status.TORN)), None)
    if torn is not None:
        fields = ("available_tokens", "used_tokens", "usage_ratio", "evictable_tokens", "protected_tokens")
        return {f"rank.kv.{field}": unknown(_TORN) for field in fields}
    free, late, page = (_number(seen, name) for name in ("kv.free_pages", "kv.release_pages", "kv.page_size"))
    capacity = found.get("rank.kv.capacity_tokens", _NOT_READ)
    # Not the field: that may hold what the metrics had a while ago.
    evictable = _number(seen, "cache.evictable")
    if "cache.evictable" in seen:
        evictable = explained(seen["cache.evictable"].entry, evictable, classes)
    source = "object:Scheduler.token_to_kv_pool_allocator"
    available = combine(lambda free, late, page: (free + late) * page, free, late, page, source=source)
    used = combine(
        lambda capacity, available, evictable: max(0, capacity - available - evictable),
        *(capacity, available, evictable),
        source=f"{source}, Scheduler.tree_cache",
    )
    ratio = combine(_ratio, used, capacity, source=f"{source}, Scheduler.tree_cache")
    return {"rank.kv.available_tokens": available, "rank.kv.used_tokens": used, "rank.kv.usage_ratio": ratio}


def _number(seen: Seen, name: str) -> Fact[int]:
    one = seen.get(name)
    if one is None:
        return _NOT_READ
    if isinstance(one.fact, Known) and not isinstance(one.fact.value, int):
        return unknown(f"{one.path} is no number")
    return one.fact


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _spec_shapes(seen: Seen, batch: str) -> Facts:
    """The shapes of the tensors of a batch's speculative input, by attribute."""
    field = f"rank.batches[{batch}].spec_info_shapes"
    kind = seen[f"batch.{batch}.spec"]
    if kind.is_none_on_the_way():
        return {field: NO_BATCH}
    mine = [one for name, one in seen.items() if name.startswith(f"batch.{batch}.spec.") and one.entry.read == "tensor"]
    if any(one.status in (Status.RELAXED, Status.TORN) for one in (kind, *mine)):
        return {field: unknown(_TORN)}
    if not isinstance(kind.fact, Known):
        return {field: kind.fact}
    if not mine:
        return {}
    shapes = {
        one.path.rpartition(".")[2]: one.fact.value.shape
        for one in mine
        if isinstance(one.fact, Known) and isinstance(one.fact.value, Tensor)
    }
    return {field: Known(shapes, kind.fact.source, kind.fact.how, kind.fact.at)}


_SWITCHES = {"custom_allreduce": "custom", "pynccl": "pynccl", "symmetric_memory": "symm_mem", "pcie_ipc": "pcie"}


def _communicators(seen: Seen) -> Facts:
    found: Facts = {}
    for group in GROUPS:
        size = value(seen, f"groups.{group}.size")
        if size is None:
            continue
        for field, name in _SWITCHES.items():
            found[f"collectives.communicators[{group}].{field}"] = _switch(seen, f"groups.{group}", name, size)
    return found


def _switch(seen: Seen, group: str, name: str, size: int) -> Fact[str]:
    """Whether a communicator reduces, and if not why."""
    kind, disabled = seen.get(f"{group}.{name}.class"), seen.get(f"{group}.{name}.disabled")
    if kind is None:
        return _NOT_READ
    if isinstance(kind.fact, Unknown):
        return kind.fact
    if size == 1:
        return unknown("a group of one rank has nothing to reduce")
    if kind.fact.value is None:
        unwanted = name == "custom" and value(seen, f"{group}.wants_custom") is False
        return _with(kind.fact, NOT_WANTED if unwanted else "absent")
    if disabled is not None and disabled.fact.or_else(False) is True:
        return _with(kind.fact, "disabled")
    return _with(kind.fact, "on")


def _speculation(found: Facts, seen: Seen) -> None:
    if found.get("speculation.algorithm", _NOT_READ).or_else("") == "none":
        for field, fact in found.items():
            if field.startswith("speculation.") and isinstance(fact, Unknown):
                found[field] = _DOES_NOT_SPECULATE
        return
    if "speculation.accepted_tokens" in seen:
        accepted, verified = _number(seen, "speculation.accepted_tokens"), _number(seen, "speculation.verify_calls")
        since_start = combine(_ratio, accepted, verified, source=origin(seen["speculation.accepted_tokens"].path))
        if verified.or_else(None) == 0:
            since_start = unknown("nothing was verified yet")
        found["speculation.accept_length_since_start_tokens"] = since_start
    if "speculation.adaptive" in seen:
        found["speculation.adaptive_state"] = _adaptive_state(seen)


def _adaptive_state(seen: Seen) -> Fact[str]:
    controller = seen["speculation.adaptive"].fact
    if isinstance(controller, Unknown) or controller.value is None:
        return unknown("the server does not adapt its speculation")
    steps, states = value(seen, "speculation.steps"), value(seen, "speculation.adaptive.states")
    words = [f"{steps} steps now"] if steps is not None else []
    words += [f"prepared for {', '.join(states)}"] if states else []
    now = seen["speculation.steps"].fact if "speculation.steps" in seen else controller
    return Known("; ".join(words) or controller.value, controller.source, "derived", getattr(now, "at", 0.0))


def _if_counted(name: str, fact: Fact[Any], seen: Seen) -> Fact[Any]:
    """What the scheduler only counts for its metrics is no number where it does not count."""
    if not name.startswith("stats.") or name in ("stats.enabled", "stats.last_gen_throughput"):
        return fact
    if value(seen, "stats.enabled") is not True:
        return unknown("the server counts it only with --enable-metrics")
    if name.startswith("stats.spec_") and fact.or_else(None) == 0:
        return unknown("no verification was logged yet")
    return fact


def _decode_rate(found: Facts) -> None:
    """The server leaves its last figure as it is when the last request ends."""
    running = found.get("rank.running_requests")
    if isinstance(running, Known) and running.value == 0 and "rank.decode_tokens_per_s" in found:
        found["rank.decode_tokens_per_s"] = Known(0.0, running.source, "derived", running.at)


def _graphs(found: Facts, seen: Seen) -> Facts:
    """Under the names that logs use, without the sets of runners that are not there at all."""
    # Without graphs there is no mode to be read, but a target that checks drafts would capture for that.
    speculates = found.get("speculation.algorithm", _NOT_READ).or_else("none") != "none"
    verifies = (value(seen, "graphs.decode.mode") or (VERIFY_MODE if speculates else "")) == VERIFY_MODE
    sets: dict[str, Facts] = {}
    for field in [field for field in found if field.startswith("graphs[")]:
        name, _, rest = field.removeprefix("graphs[").partition("].")
        name = "target verify" if verifies and name == "target decode" else name
        sets.setdefault(name, {})[rest] = found.pop(field)
    for name, told in sets.items():
        if not any(isinstance(fact, Known) for fact in told.values()):
            continue
        is_off = told.get("enabled", _NOT_READ).or_else(None) is False
        for rest, fact in told.items():
            found[f"graphs[{name}].{rest}"] = _NO_GRAPHS if is_off and isinstance(fact, Unknown) else fact
    return found
