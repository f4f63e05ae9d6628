"""A /proc of our own making, for tests: only the files that sgdiag reads."""

from __future__ import annotations

from pathlib import Path

from sgdiag.sources.procfs import ProcFs

BOOT = 1_700_000_000
BASE = ("/opt/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/m/tiny", "--port", "31000")
SPAWNED = (
    "/opt/env/bin/python",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main()",
    "--multiprocessing-fork",
)
TRACKER = ("/opt/env/bin/python", "-c", "from multiprocessing.resource_tracker import main;main(6)")
SESSION = 100


class Tree:
    """Processes below ``root``; network and user namespace are those of process ``me``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "stat").write_text(f"cpu  1 2 3\nbtime {BOOT}\nprocesses 5\n")
        (root / "net").mkdir()
        (root / "net" / "tcp").write_text("  sl  local_address rem_address   st\n")
        self.proc = ProcFs(root)

    def add(
        self,
        pid: int,
        argv: tuple[str, ...] = (),
        *,
        parent: int = 1,
        comm: str = "python",
        state: str = "S",
        start: int = 5000,
        cpu: int = 0,
        pages: int = 256,
        session: int = SESSION,
        group: int = SESSION,
        environ: bytes = b"HOME=/root\0",
        cgroup: str = "0::/\n",
        namespace_pids: tuple[int, ...] = (),
        maps: tuple[str, ...] = (),
        uid: int = 1000,
        cwd: str = "/",
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = [state, parent, group, session, 0, -1, 0, 0, 0, 0, 0, cpu, 0, 0, 0, 20, 0, 7, 0, start, 1000, pages]
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(map(str, fields))} 0 0\n")
        inner = "\t".join(map(str, namespace_pids or (pid,)))
        (folder / "status").write_text(
            f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
            f"NSpid:\t{inner}\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nSeccomp:\t0\n"
        )
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
        (folder / "environ").write_bytes(environ)
        (folder / "cgroup").write_text(cgroup)
        (folder / "maps").write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 42 {path}\n" for path in maps))
        for name in ("fd", "ns"):
            (folder / name).mkdir(exist_ok=True)
        for name, target in {
            "net": "../net",
            "ns/net": "net:[1]",
            "ns/user": "user:[1]",
            "root": "/",
            "cwd": cwd,
        }.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)

    def listen(self, pid: int, port: int, inode: int) -> None:
        folder = self.root / str(pid)
        (folder / "fd" / str(inode)).symlink_to(f"socket:[{inode}]")
        with (folder / "net" / "tcp").open("a") as stream:
            stream.write(
                f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"
            )

    def remove(self, pid: int) -> None:
        (self.root / str(pid)).rename(self.root / f"gone-{pid}")

    def server(
        self,
        first: int = 100,
        argv: tuple[str, ...] = BASE,
        *,
        parent: int = 1,
        start: int = 5000,
        session: int = SESSION,
    ) -> None:
        """A launcher, its resource tracker, two schedulers and a detokenizer."""

        def add(pid: int, argv: tuple[str, ...], parent: int, comm: str = "python", environ: bytes = b"A=1\0") -> None:
            self.add(pid, argv, parent=parent, comm=comm, environ=environ, start=start, session=session, group=session)

        add(first, argv, parent)
        add(first + 1, TRACKER, first, environ=b"NCCL_CUMEM_ENABLE=0\0SGLANG_A=1\0")
        for number in (0, 1):
            title = (f"sglang::scheduler_TP{number}",)
            add(first + 2 + number, title, first, comm="sglang::schedul", environ=b"\0\0SGLANG_B=2\0")
        add(first + 4, ("sglang::detokenizer",), first, comm="sglang::detoken")
