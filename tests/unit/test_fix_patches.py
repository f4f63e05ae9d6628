"""Unified diffs: against `diff -u` for what is right, by hand for what must be refused."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.fixes.patches import PatchError, changes_to, combine, parse

LINES = st.lists(st.sampled_from([b"a", b"b", b"c", b"", b"\r", b"-x", b"+y", b"@@ -1 +1 @@", b"\\ odd", b"--- a/q"]))


def joined(lines: list[bytes], *, newline: bool) -> bytes:
    text = b"\n".join(lines)
    return text + b"\n" if newline and text else text


def diff(old: bytes, new: bytes, name: bytes = b"f.py") -> bytes:
    def lines(content: bytes) -> list[bytes]:
        return [line + b"\n" for line in content.split(b"\n")[:-1]] + [
            line for line in content.split(b"\n")[-1:] if line
        ]

    pieces = list(difflib.diff_bytes(difflib.unified_diff, lines(old), lines(new), b"a/" + name, b"b/" + name, n=3))
    return b"".join(piece if piece.endswith(b"\n") else piece + b"\n\\ No newline at end of file\n" for piece in pieces)


def patched(old: bytes, patch: bytes) -> bytes:
    (file,) = parse(patch)
    return combine(file.path, old, {"fix": changes_to(file, old)})


@given(LINES, LINES, st.booleans(), st.booleans())
def test_a_diff_applied_gives_the_new_file(old: list[bytes], new: list[bytes], old_ends: bool, new_ends: bool) -> None:
    before, after = joined(old, newline=old_ends), joined(new, newline=new_ends)
    if before == after:
        return
    assert patched(before, diff(before, after)) == after


@given(LINES, LINES, st.integers(0, 30), st.sampled_from([b"a", b"other"]))
def test_a_file_that_differs_in_any_line_of_context_is_refused(
    old: list[bytes], new: list[bytes], at: int, line: bytes
) -> None:
    before, after = joined(old, newline=True), joined(new, newline=True)
    if before == after:
        return
    (file,) = parse(diff(before, after))
    changed = list(old)
    if at < len(changed):
        changed[at] = line
    try:
        result = combine("f", joined(changed, newline=True), {"fix": changes_to(file, joined(changed, newline=True))})
    except PatchError:
        return
    touched = {number for hunk in file.hunks for number in range(hunk.start, hunk.start + len(hunk.old))}
    assert changed == old or at not in touched
    assert changed != old or result == after


@given(st.binary(max_size=400))
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(PatchError):
        parse(b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@ " + junk)


def numbered(count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(count))


def test_patches_that_share_context_but_no_line_combine() -> None:
    base = numbered(20)
    one = base.replace(b"line 9\n", b"nine\n")
    two = base.replace(b"line 11\n", b"eleven\nand more\n")
    both = {name: changes_to(parse(diff(base, new))[0], base) for name, new in (("one", one), ("two", two))}
    expected = base.replace(b"line 9\n", b"nine\n").replace(b"line 11\n", b"eleven\nand more\n")
    assert combine("f", base, both) == expected
    assert combine("f", base, dict(reversed(both.items()))) == expected


@pytest.mark.parametrize("other", [b"NINE\n", b"", b"line 9\nbehind\nnine\n"])
def test_patches_that_change_the_same_line_are_refused(other: bytes) -> None:
    base = numbered(20)
    changes = {
        name: changes_to(parse(diff(base, base.replace(b"line 9\n", new)))[0], base)
        for name, new in (("one", b"nine\n"), ("two", other))
    }
    if changes["two"][0].start != changes["one"][0].start:
        assert combine("f", base, changes)
        return
    with pytest.raises(PatchError, match="one and two both change it"):
        combine("f", base, changes)


@pytest.mark.parametrize(("second", "fits"), [(4, True), (3, False), (2, False), (1, False)])
def test_hunks_that_overlap_are_refused(second: int, fits: bool) -> None:
    """The first hunk takes lines 1 to 3."""
    hunk = b"@@ -%d +%d @@\n-x\n+y\n"
    patch = b"--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n d\n" + hunk % (second, second)
    if fits:
        assert len(parse(patch)[0].hunks) == 2
        return
    with pytest.raises(PatchError, match="hunks overlap or are out of order"):
        parse(patch)


def test_the_line_that_differs_is_named() -> None:
    base = numbered(10)
    (file,) = parse(diff(base, base.replace(b"line 5\n", b"five\n")))
    with pytest.raises(PatchError, match=r"f.py, line 5: expected 'line 4', but it says 'moved'"):
        changes_to(file, base.replace(b"line 4\n", b"moved\n"))
    with pytest.raises(PatchError, match="ends before it"):
        changes_to(file, numbered(5))


def test_files_that_come_and_go() -> None:
    (new,) = parse(b"--- /dev/null\n+++ b/pkg/new.py\n@@ -0,0 +1,2 @@\n+one\n+two\n")
    assert (new.path, new.creates, new.deletes) == ("pkg/new.py", True, False)
    assert combine("f", b"", {"fix": changes_to(new, b"")}) == b"one\ntwo\n"
    (old,) = parse(b"--- a/pkg/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n")
    assert (old.path, old.creates, old.deletes) == ("pkg/old.py", False, True)


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (b"", "changes no file"),
        (b"--- a/x\n+++ b/x\n", "without hunks"),
        (b"@@ -1 +1 @@\n-a\n+b\n", "Unexpected hunk"),
        (b"--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "no path below"),
        (b"--- /etc/x\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "a rename"),
        (b"--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "a rename"),
        (b"--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n", "shorter than expected"),
        (b"--- a/x\n+++ b/x\n@@ -5 +5 @@\n-a\n+b\n@@ -2 +2 @@\n-a\n+b\n", "out of order"),
        (b"diff --git a/x b/x\nBinary files a/x and b/x differ\n", "only changes of text"),
        (b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "twice"),
    ],
)
def test_patches_that_need_guessing_are_refused(patch: bytes, says: str) -> None:
    with pytest.raises(PatchError, match=says):
        parse(patch)
