"""What can go wrong when another process is read, as types that a caller can act on."""

from __future__ import annotations


class RemoteError(Exception):
    """Nothing more can be read from this process; the message says why in one line."""


class GoneError(RemoteError):
    """The process ended, or runs another program now."""


class NotPermittedError(RemoteError):
    """The kernel does not let us read the process' memory."""


class UnsupportedError(RemoteError):
    """The process is no Python that this package can read."""


class CalibrationError(RemoteError):
    """The layouts of this interpreter could not be measured."""


class PathError(ValueError):
    """An attribute path that does not parse."""


class UnreadableError(Exception):
    """One value could not be read; the process as a whole is fine."""


class BadAddressError(UnreadableError):
    """No readable memory there: a pointer that was stale, or changed while it was followed."""


class TornError(UnreadableError):
    """What was read cannot be a live object: the target was changing it meanwhile."""


class AbsentError(UnreadableError):
    """No such attribute, key or index."""


class OpaqueError(UnreadableError):
    """It exists, but only code of the target could say what it is worth."""
