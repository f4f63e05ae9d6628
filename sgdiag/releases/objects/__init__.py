"""What to read out of a live scheduler process, by release, as data; the reading itself is done elsewhere."""

from sgdiag.releases.objects.classes import CLASSES, Home
from sgdiag.releases.objects.collectives import GROUPS, NOT_WANTED
from sgdiag.releases.objects.form import Pace, Path, Read, Step, Unit
from sgdiag.releases.objects.graphs import BACKENDS, EAGER, VERIFY_MODE
from sgdiag.releases.objects.roots import EPOCH, RELEASE, Frame, Loop
from sgdiag.releases.objects.select import CHECKED, Entry, Schema, home, schema

__all__ = [
    "BACKENDS",
    "CHECKED",
    "CLASSES",
    "EAGER",
    "EPOCH",
    "GROUPS",
    "NOT_WANTED",
    "RELEASE",
    "VERIFY_MODE",
    "Entry",
    "Frame",
    "Home",
    "Loop",
    "Pace",
    "Path",
    "Read",
    "Schema",
    "Step",
    "Unit",
    "home",
    "schema",
]
