"""The flags about captured graphs: those of 0.5.14 and newer name a phase, and from 0.5.20 on no others are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sgdiag.releases.versions import at_least, parse

PHASES_SINCE = "0.5.14"
"""The old names stayed as aliases up to 0.5.19."""

UNASKED_SINCE = "0.5.10"
"""Before, prefill graphs were captured only where they were asked for."""


class GraphFlags(NamedTuple):
    """``bound`` is on the decode batches that are captured and ``sizes`` lists them, each with ``{0}`` for numbers of
    requests; ``no_decode`` and ``no_prefill`` switch graphs off."""

    bound: str
    sizes: str
    no_decode: str
    no_prefill: str


NEWER = GraphFlags(
    bound="--cuda-graph-max-bs-decode {0}",
    sizes="--cuda-graph-bs-decode {0}",
    no_decode="--cuda-graph-backend-decode=disabled",
    no_prefill="--cuda-graph-backend-prefill=disabled",
)
_UNASKED = GraphFlags(
    bound="--cuda-graph-max-bs {0}",
    sizes="--cuda-graph-bs {0}",
    no_decode="--disable-cuda-graph",
    no_prefill="--disable-piecewise-cuda-graph",
)
_ASKED = _UNASKED._replace(no_prefill="no --enable-piecewise-cuda-graph")
OLDER = _UNASKED._replace(no_prefill=f"{_UNASKED.no_prefill} (0.5.9: {_ASKED.no_prefill})")
"""Of a release before the phases, of which no more is known."""

EITHER = GraphFlags(
    bound=f"{NEWER.bound} (up to 0.5.13: {OLDER.bound})",
    sizes=f"{NEWER.sizes} (up to 0.5.13: {OLDER.sizes})",
    # The old name of this one is taken by all releases.
    no_decode=OLDER.no_decode,
    no_prefill=f"{NEWER.no_prefill} (from 0.5.10 up to 0.5.13: {_UNASKED.no_prefill})",
)
"""Where nothing is known of the release."""


def graph_flags(release: str, args: Mapping[str, object]) -> GraphFlags | None:
    """Those of ``release``, or where that is empty of the one that has such server arguments; None if neither tells."""
    if parse(release) is not None:
        if at_least(release, PHASES_SINCE):
            return NEWER
        return _UNASKED if at_least(release, UNASKED_SINCE) else _ASKED
    if "cuda_graph_config" in args or "cuda_graph_max_bs_decode" in args:
        return NEWER
    if "disable_piecewise_cuda_graph" in args:
        return _UNASKED
    if "enable_piecewise_cuda_graph" in args:
        return _ASKED
    return OLDER if "cuda_graph_max_bs" in args else None
