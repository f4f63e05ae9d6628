"""The one error the lab raises for anything a user can act on."""

from __future__ import annotations

from collections.abc import Sequence

from sgdiag.model.errors import SgdiagError


class LabError(SgdiagError):
    """The lab could not do what was asked; the text is one line that says what to do.

    `detail` holds further lines to show below it, such as the end of a server's log.
    """

    def __init__(self, text: str, detail: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.detail = tuple(detail)
