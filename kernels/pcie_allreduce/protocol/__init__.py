"""The protocols of the PCIe allreduce, checked without a GPU.

``python -m kernels.pcie_allreduce.protocol`` explores every order of events for small runs and prints what holds and
which mistakes are found; ``--wide`` adds larger runs.
"""

from .cases import FAILS, HOLDS, SOUND, WIDE, Case
from .explore import Result, explore, walk
from .programs import Algorithm, Call, Design, assemble

__all__ = [
    "FAILS",
    "HOLDS",
    "SOUND",
    "WIDE",
    "Algorithm",
    "Call",
    "Case",
    "Design",
    "Result",
    "assemble",
    "explore",
    "walk",
]
