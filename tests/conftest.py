"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# A shared machine stalls now and then; what is slow is measured by the benchmarks, not by property tests.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
