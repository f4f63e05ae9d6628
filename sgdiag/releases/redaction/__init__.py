"""Takes out of a snapshot what its reader has no business to know, and leaves what a diagnosis needs."""

from sgdiag.releases.redaction.redactor import Private, Redactor, redact
from sgdiag.releases.redaction.standins import KINDS, Kind, Tally

__all__ = ["KINDS", "Kind", "Private", "Redactor", "Tally", "redact"]
