"""Where draft and target do not fit."""

from sgdiag.rules.postmortem.speculation import acceptance, code, shapes, tensors

__all__ = ["acceptance", "code", "shapes", "tensors"]
