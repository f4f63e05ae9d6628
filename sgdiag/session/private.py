"""What is private on this host: names and secrets that only somebody who is here can know to be such."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
from collections.abc import Iterable, Mapping, Sequence

from sgdiag.model import Snapshot
from sgdiag.releases.redaction import Private
from sgdiag.releases.secrets import HIDDEN, redact_command, redact_variables
from sgdiag.session.limits import StuckError, within
from sgdiag.sources.procfs import ProcFs, parse_environ

_HOST_VARIABLES = ("HOSTNAME", "HOST", "NODE_NAME", "POD_NAME", "SLURMD_NODENAME", "MASTER_ADDR")
_USER_VARIABLES = ("USER", "LOGNAME", "SUDO_USER")

LOOK_S = 2.0
"""How long the processes may be asked: the kernel can keep whoever asks one that hangs."""


def private_here(snapshot: Snapshot, *, keys: Iterable[str] = (), proc: ProcFs | None = None) -> Private:
    """The names of this host and of the users whose processes ``snapshot`` shows, and every key, password and token
    that those were started with, beside ``keys``. What may not be read is left out."""
    proc = proc or ProcFs()
    hosts = {platform.node()}
    users = set(_logins([os.getuid(), *(process.uid.or_else(0) for process in snapshot.processes)]))
    secrets = {key for key in keys if key}

    def ask() -> None:
        for process in snapshot.processes:
            with contextlib.suppress(OSError):
                variables = parse_environ(proc.read(process.pid, "environ")).variables
                hosts.update(variables[name] for name in _HOST_VARIABLES if variables.get(name))
                users.update(variables[name] for name in _USER_VARIABLES if variables.get(name))
                secrets.update(secrets_in(variables, proc.cmdline(process.pid)))

    # What was learned before one process kept us waiting counts.
    with contextlib.suppress(StuckError):
        within(LOOK_S, ask, proc=proc)
    return Private(secrets=frozenset(secrets.copy()), hosts=frozenset(hosts.copy()), users=frozenset(users.copy()))


def secrets_in(variables: Mapping[str, str], argv: Sequence[str]) -> set[str]:
    """The values of the variables and flags that are secret by their names."""
    found = {variables[name] for name, shown in redact_variables(variables).items() if shown == HIDDEN}
    for word, shown in zip(argv, redact_command(argv), strict=True):
        if word != shown:
            found.add(word if shown == HIDDEN else word.partition("=")[2])
    return {secret for secret in found if secret}


def _logins(uids: Iterable[int]) -> Iterable[str]:
    for uid in dict.fromkeys(uids):
        with contextlib.suppress(KeyError):
            yield pwd.getpwuid(uid).pw_name
