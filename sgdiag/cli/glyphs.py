"""Output whose encoding lacks some of the characters that sgdiag draws with."""

from __future__ import annotations

import codecs
import io
from types import MappingProxyType

PLAIN = MappingProxyType(
    dict(zip("●○◐▲✗✓≠", "*o%!x+/", strict=True))
    | dict(zip("█▓▒░▉▊▋▌▍▎▏", "#%=:####|||", strict=True))
    | dict(zip("▁▂▃▄▅▆▇", "_,-~=+*", strict=True))
    | dict(zip("←↑→↓↻▶■‖", "<^>v@>#|", strict=True))
    | dict(zip("─━│├└", "-=||`", strict=True))
    | dict(zip("·•…µ≤\xa0", ".*~u< ", strict=True))
)
"""One column of ASCII for each of them. None is ``?``, which says that something is not known."""

_ERRORS = "sgdiag-plain"
_ASCII = "sgdiag_ascii"


def fit(stream: object) -> None:
    """Makes a text stream take any text: for a character that its encoding lacks, the one of ``PLAIN``, else ``?``."""
    if not isinstance(stream, io.TextIOWrapper):
        return
    codecs.register_error(_ERRORS, _plain)
    if codecs.lookup(stream.encoding).name == "ascii":
        # click takes a stream of that name for misconfigured, and would write UTF-8 to it.
        codecs.register(_ascii_by_another_name)
        stream.reconfigure(encoding=_ASCII)
    stream.reconfigure(errors=_ERRORS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end


def _ascii_by_another_name(name: str) -> codecs.CodecInfo | None:
    if name != _ASCII:
        return None
    known = codecs.lookup("ascii")
    return codecs.CodecInfo(
        known.encode,
        known.decode,
        known.streamreader,
        known.streamwriter,
        known.incrementalencoder,
        known.incrementaldecoder,
        name,
    )
