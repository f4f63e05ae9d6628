"""The checker as a command: one line per run, exit code 1 if any came out otherwise than it must."""

from __future__ import annotations

import sys
import time

from . import FAILS, HOLDS, WIDE, assemble, explore


def main(arguments: list[str]) -> int:
    """Explore all runs; ``--wide`` with the larger ones."""
    unknown = [word for word in arguments if word != "--wide"]
    if unknown:
        sys.stderr.write(f"unknown argument {unknown[0]}; there is only --wide\n")
        return 2
    wrong = 0
    for case in [*HOLDS, *FAILS, *(WIDE if arguments else [])]:
        began = time.monotonic()
        result = explore(assemble(case.design, case.ranks, case.calls))
        found = result.violation.fault if result.violation else None
        right = found == case.fault and result.whole
        wrong += not right
        verdict = found or ("holds" if result.whole else "too large")
        took = f"{result.states:8} states {time.monotonic() - began:6.1f} s"
        sys.stdout.write(f"{'ok' if right else 'WRONG':6}{verdict:12}{took}  {case.title}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
