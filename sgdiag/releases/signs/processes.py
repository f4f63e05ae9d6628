"""Processes that end, and how."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

SIGNS: tuple[Sign, ...] = (
    Sign(
        "exit-code",
        # The word before the number differs: SGLang's launcher, torchrun, Docker, Kubernetes, shells.
        r"\b(?:[Ee]xit ?(?:code|status)|[Ee]xitcode|[Ee]xitCode|[Ee]xit Code|[Ee]xited(?: with)?(?: (?:code|status))?"
        r"|[Ee]xit (?=-))"
        r"[ :=(]*(?:of |is )?(?P<code>-?\d{1,3})\b(?! ms)",
        ("xitcode", "xited", "xitCode", "xitstatus", "xit "),
    ),
    Sign(
        "wait-status",
        # waitpid's raw status, printed as if it were an exit code.
        r"Child process unexpectedly failed with (?:an exit code |exitcode=)(?P<status>\d{1,5})\b",
        ("xitcode", "xit "),
    ),
    Sign(
        "kernel-killed",
        r"[Oo]ut of memory: Kill(?:ed)? process (?P<pid>\d+)(?: \((?P<name>[^)]{1,40})\))?|"
        r"cgroup out of memory|invoked oom-killer|\boom-kill:|\boom_reaper\b|\bOOMKilled\b|"
        r"\b[Kk]illed by the (?:OS|kernel)\b|\b(?:cgroup|container|memcg|host)\b.{0,20}\bOOM[- ]?[Kk]ill(?:er|ed|s)?\b|"
        r"\bOOM[- ]?[Kk]ill(?:ed|s)\b.{0,30}\b(?:cgroup|kernel)\b|"
        r"\b(?:[Kk]ernel|OS|Linux|systemd-oomd?)\b.{0,30}\b(?:OOM[- ][Kk]|oom-k)ill(?:er|ed)\b(?!\. Run)|"
        r"systemd-oomd.{0,40}[Kk]illed",
        ("illed by the ", "oom-kill", "oom_reaper", "OOM", "systemd-oomd", "ut of memory"),
    ),
    Sign(
        "killed",
        # Not the launcher's remark on what -9 means, which stands beside every exit code, nor its own clean-up.
        r"^(?:\S+: line \d+: +\d+ )?Killed(?:$|\s{2,})|(?:it/s|s/it)\]\s*Killed$|^\[\d+\]\s+\d+ killed |"
        r"(?<!code is -9 \()\bSIGKILL(?:ed|s)?\b(?!;| for| within|\) *,)|\b[Ss]ignal 9\b",
        ("Killed", " killed ", "SIGKILL", "ignal 9"),
    ),
    Sign("hint-at-the-oom-killer", r"a common cause is the OS OOM killer", ("OOM",)),
    Sign(
        "host-allocation-failed",
        r"DefaultCPUAllocator: (?:can't|not enough)|\bunable to mmap \d+ bytes|\[Errno 12\] Cannot allocate memory|"
        r"^MemoryError\b|std::bad_alloc|\bNV_ERR_NO_MEMORY\b",
        ("DefaultCPUAllocator", "MemoryError", "bad_alloc", "NV_ERR_NO_MEMORY", "[Errno ", "nable to "),
    ),
    Sign(
        "segmentation-fault",
        r"Fatal Python error: Segmentation fault|\bSIGSEGV\b|\bSegmentation fault\b",
        ("Segmentation fault", "SIGSEGV"),
    ),
    Sign(
        "bus-error",
        r"Fatal Python error: Bus error|\bSIGBUS\b|\bBus error\b(?: \(core dumped\))?",
        ("Bus error", "SIGBUS"),
    ),
)
