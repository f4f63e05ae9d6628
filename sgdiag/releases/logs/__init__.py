"""What SGLang writes into its log: lines to events, events to facts.

``LogParser`` turns bytes into typed events (``events``), ``Fold`` collects them, ``snapshot_of`` makes facts of what it
has. None reads files; ``sgdiag.sources.serverlog`` does. Formats were checked in releases 0.5.8 to 0.5.23; older ones
are read as far as their lines look alike.
"""

from sgdiag.releases.logs.arguments import parse_server_args
from sgdiag.releases.logs.facts import error_lines, snapshot_of
from sgdiag.releases.logs.fold import Fold
from sgdiag.releases.logs.lines import MAX_LINE_BYTES
from sgdiag.releases.logs.parser import LogParser, NotableLine, looks_like_sglang

__all__ = [
    "MAX_LINE_BYTES",
    "Fold",
    "LogParser",
    "NotableLine",
    "error_lines",
    "looks_like_sglang",
    "parse_server_args",
    "snapshot_of",
]
