"""Becomes the calibration child: takes the target's rights and root directory, and ends with its parent.

A program of its own, since a fork of a process with threads must do nothing but run another one. Its only argument is
a JSON object: ``parent`` (pid), ``root`` (directory or ""), ``program`` (an open descriptor), ``arguments``,
``environment``, ``owner`` ([uid, gid, groups] or null), ``cpu_seconds``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_MAX_FILE_BYTES = 1 << 16


def main() -> None:
    """Never returns."""
    order = json.loads(sys.argv[1])
    os.nice(10)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (order["cpu_seconds"], order["cpu_seconds"]))
    # Enough for what an import tries out in a temporary directory, too little to fill a disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    if order["root"]:
        os.chroot(order["root"])
    os.chdir("/")
    if order["owner"]:
        uid, gid, groups = order["owner"]
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # After the change of identity, which would clear it.
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != order["parent"]:
        sys.exit(1)
    os.execve(order["program"], order["arguments"], order["environment"])  # noqa: S606


if __name__ == "__main__":
    main()
