"""Writes the patches of the fix pcie-allreduce: the kernels' own files, and what calls them in parallel_state.py.

python -m tests.pcie_patch SOURCES      SOURCES/<release>/sglang: wheels of sglang, unpacked
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sgdiag.resources import folder

FIX = "pcie-allreduce"
RELEASES = ("0.5.9", "0.5.12.post1", "0.5.15.post1", "0.5.20", "0.5.23")

CALLER = "sglang/srt/distributed/parallel_state.py"
PACKAGE = "sglang/srt/distributed/device_communicators/sgdiag_pcie_allreduce"
PARTS = ("__init__.py", "communicator.py", "runtime/*", "tuning/*")
"""What of kernels/pcie_allreduce a server needs."""

_TAKES = "self.sgdiag_comm is not None and self.sgdiag_comm.should_allreduce(input_)"

_CONSTRUCT = (
    "        self.torch_symm_mem_comm: Optional[TorchSymmMemCommunicator] = None\n",
    """\
        from sglang.srt.distributed.device_communicators.sgdiag_pcie_allreduce.communicator import (
            create,
        )

        self.sgdiag_comm: Optional[Any] = create(
            group_name=group_name,
            world_size=self.world_size,
            cpu_group=self.cpu_group,
            device_group=self.device_group,
            device=self.device,
            allowed=use_custom_allreduce,
            custom_allreduce=self.ca_comm,
        )

        self.torch_symm_mem_comm: Optional[TorchSymmMemCommunicator] = None
""",
)

_CALL = (
    """\
        ca_comm = self.ca_comm
        qr_comm = self.qr_comm
""",
    """\
        if outplace_all_reduce_method == "sgdiag_pcie":
            return self.sgdiag_comm.all_reduce(input_)
        ca_comm = self.ca_comm
        qr_comm = self.qr_comm
""",
)

_DESTROY = (
    """\
    def destroy(self):
""",
    """\
    def destroy(self):
        # While its ranks can still meet on the CPU group.
        if self.sgdiag_comm is not None:
            self.sgdiag_comm.destroy()
            self.sgdiag_comm = None
""",
)

_CHOOSE_INLINE = (
    """\
            outplace_all_reduce_method = "ca"
""",
    f"""\
            outplace_all_reduce_method = "ca"
        elif {_TAKES}:
            outplace_all_reduce_method = "sgdiag_pcie"
""",
)

_CHOOSE_INLINE_MSCCLPP = (
    _CHOOSE_INLINE[0],
    """\
            outplace_all_reduce_method = "ca"
        elif (
            self.sgdiag_comm is not None
            and not should_use_pymscclpp_allreduce
            and self.sgdiag_comm.should_allreduce(input_)
        ):
            outplace_all_reduce_method = "sgdiag_pcie"
""",
)

_CHOOSE = (
    """\
            return "ca"
""",
    """\
            return "ca"
        if (
            self.sgdiag_comm is not None
            and not should_use_pymscclpp_allreduce
            and self.sgdiag_comm.should_allreduce(input_)
        ):
            return "sgdiag_pcie"
""",
)

_SYMMETRIC = (
    """\
        if self.pynccl_comm is not None and self.is_symmetric_memory_enabled():
""",
    f"""\
        if (
            self.pynccl_comm is not None
            and self.is_symmetric_memory_enabled()
            and not ({_TAKES})
        ):
""",
)

_SYMMETRIC_MSCCLPP = (
    """\
            and self.is_symmetric_memory_enabled()
            and not should_use_pymscclpp_allreduce
""",
    f"""\
            and self.is_symmetric_memory_enabled()
            and not should_use_pymscclpp_allreduce
            and not ({_TAKES})
""",
)

_COMPILING = (
    """\
                and self.pynccl_comm is None
""",
    """\
                and self.pynccl_comm is None
                and self.sgdiag_comm is None
""",
)

_ALWAYS = (_CONSTRUCT, _CALL, _DESTROY)
EDITS: Mapping[str, Sequence[tuple[str, str]]] = {
    "0.5.9": (*_ALWAYS, _CHOOSE_INLINE, _SYMMETRIC),
    "0.5.12.post1": (*_ALWAYS, _CHOOSE_INLINE, _SYMMETRIC),
    "0.5.15.post1": (*_ALWAYS, _CHOOSE_INLINE_MSCCLPP, _SYMMETRIC_MSCCLPP),
    "0.5.20": (*_ALWAYS, _CHOOSE, _SYMMETRIC_MSCCLPP, _COMPILING),
    "0.5.23": (*_ALWAYS, _CHOOSE, _SYMMETRIC_MSCCLPP, _COMPILING),
}
"""What becomes of parallel_state.py, by release; each old text is there exactly once."""


def edited(text: str, release: str) -> str:
    """parallel_state.py with the calls. Raises ``ValueError`` where an old text is not there once."""
    for old, new in EDITS[release]:
        if text.count(old) != 1:
            raise ValueError(f"{release}: {text.count(old)} places for {old.strip().splitlines()[0]!r}")
        text = text.replace(old, new)
    return text


def added() -> Iterator[tuple[str, str]]:
    """Path in SGLang and text of every file that is new there."""
    source = folder("kernels") / "pcie_allreduce"
    for part in PARTS:
        for file in sorted(source.glob(part)):
            if file.is_file():
                yield f"{PACKAGE}/{file.relative_to(source).as_posix()}", file.read_text(encoding="utf-8")


def patch(release: str, sources: Path) -> str:
    """The whole patch for a release."""
    before = (sources / release / CALLER).read_text(encoding="utf-8")
    lines = list(_diff(CALLER, before, edited(before, release)))
    for path, text in added():
        lines += _diff(path, None, text)
    return "".join(lines)


def _diff(path: str, before: str | None, after: str) -> Iterator[str]:
    old = [] if before is None else before.splitlines(keepends=True)
    source = "/dev/null" if before is None else f"a/{path}"
    return difflib.unified_diff(old, after.splitlines(keepends=True), source, f"b/{path}")


def main(sources: str) -> None:
    for release in RELEASES:
        try:
            text = patch(release, Path(sources))
        except (OSError, ValueError) as error:
            sys.exit(f"pcie_patch: {error}")
        (folder("fixes") / FIX / "patches" / f"{release}.patch").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.pcie_patch SOURCES")
    main(sys.argv[1])
