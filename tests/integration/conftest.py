"""Lab servers for integration tests: one pool per session, at most two servers at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sgdiag.lab.pool import LabPool


@pytest.fixture(scope="session")
def lab_server() -> Iterator[LabPool]:
    """Call it with a release and options of `sgdiag.lab.up`; alike calls get the same running server.

    A test may hold two servers at a time. Do not keep one in a module- or session-scoped fixture: another test may have
    it ended to make room, so ask again in each test. A test that kills its server needs no clean-up.
    """
    with LabPool(most=2, prefix="pytest") as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one release behind each other, whatever file they are in, so that they share its two servers."""

    def server(item: pytest.Item) -> tuple[str, bool]:
        params = getattr(item, "callspec", None)
        wanted = params.params if params is not None and item.get_closest_marker("lab") else {}
        return (str(wanted["release"]), bool(wanted.get("speculative"))) if "release" in wanted else ("", False)

    items.sort(key=server)
