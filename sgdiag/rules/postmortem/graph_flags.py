"""The flags about graphs that the release which wrote a log takes."""

from __future__ import annotations

from sgdiag.model import Incident
from sgdiag.releases import graph_flags as flags


def graph_flags(incident: Incident) -> flags.GraphFlags:
    """By its arguments or its lines about captures; of older and newer releases where the log has neither."""
    server = incident.snapshot.server
    known = flags.graph_flags(server.release.or_else(""), server.args.or_else({}))
    if known is not None:
        return known
    if incident.first("capture-since-0.5.14") is not None:
        return flags.NEWER
    return flags.OLDER if incident.first("capture-up-to-0.5.13") is not None else flags.EITHER
