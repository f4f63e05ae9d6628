"""Stand-in for torchvision: SGLang imports it for image models only, and torch's CPU build has no matching one."""

from __future__ import annotations

import importlib
from typing import Any

# By name, because the folder is on the path of a lab server only and not where this is type-checked.
standin = importlib.import_module("sgdiag_lab_standin")

__version__ = "0.0.0"


class InterpolationMode:
    """The names image processors compare with; nothing here interpolates."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _a_class(name: str) -> Any:
    return InterpolationMode if name == "InterpolationMode" else object


def _a_function(name: str) -> Any:
    return InterpolationMode if name == "InterpolationMode" else None


standin.install(
    {
        "torchvision.io": _a_function,
        "torchvision.transforms": _a_class,
        "torchvision.transforms.functional": _a_function,
        "torchvision.transforms.v2": _a_class,
        "torchvision.transforms.v2.functional": _a_function,
    }
)
