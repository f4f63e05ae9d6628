"""Settings for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shared machine stalls now and then; what is slow is measured by the benchmarks, not by property tests.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
