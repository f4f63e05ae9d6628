"""How the ranks of one server are named."""

from __future__ import annotations

import msgspec


class RankId(msgspec.Struct, frozen=True, order=True):
    """Place of one scheduler process in the server's data-, pipeline- and tensor-parallel grid (all from 0)."""

    dp: int = 0
    pp: int = 0
    tp: int = 0

    def label(self, *, dp_size: int = 1, pp_size: int = 1) -> str:
        """The way SGLang's own log prefix names it, without the dimensions that the server does not use."""
        parts = [f"DP{self.dp}"] * (dp_size > 1) + [f"PP{self.pp}"] * (pp_size > 1) + [f"TP{self.tp}"]
        return " ".join(parts)


def reporting_rank(dp: int, *, tp_size: int, dp_size: int, dp_attention: bool) -> RankId:
    """The rank that speaks for data-parallel worker ``dp``: the first of its attention group.

    Without attention DP each worker has a tensor-parallel grid of its own, numbered from 0; with it, the workers
    share one grid of ``tp_size`` ranks.
    """
    if dp_attention and dp_size > 0:
        return RankId(dp=dp, tp=dp * (tp_size // dp_size))
    return RankId(dp=dp)
