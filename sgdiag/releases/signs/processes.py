"""Processes that end, and how."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

SIGNS: tuple[Sign, ...] = (
    Sign(
        "exit-code",
        # The word before the number differs: SGLang's launcher, torchrun, Docker, Kubernetes, shells.
        r"(?i:\bexit(?:ed|s)?[ -]?(?:with )?(?:an? )?(?:exit )?(?:code|status)?[ :=(]*(?:of |is )?)"
        r"(?P<code>-?\d{1,3})\b(?! ms)",
        ("xit code", "xitcode", "xited", "xit status"),
    ),
    Sign(
        "wait-status",
        # waitpid's raw status, printed as if it were an exit code.
        r"Child process unexpectedly failed with (?:an exit code |exitcode=)(?P<status>\d{1,5})\b",
        ("Child process unexpectedly failed",),
    ),
    Sign(
        "kernel-killed",
        r"(?i:Out of memory: Kill(?:ed)? process (?P<pid>\d+)(?: \((?P<name>[^)]{1,40})\))?|"
        r"Memory cgroup out of memory|invoked oom-killer|\boom-kill:|\boom_reaper\b|\bOOMKilled\b|"
        r"\b(?:kernel|OS|Linux|systemd-oomd?)\b.{0,30}\bOOM[- ]kill(?:er|ed)\b(?!\. Run)|systemd-oomd.{0,40}[Kk]illed)",
        ("Kill", "cgroup out of memory", "oom-kill", "oom_reaper", "OOM", "oomd"),
    ),
    Sign(
        "killed",
        # Not the launcher's remark on what -9 means, which stands beside every exit code, nor its own clean-up.
        r"^(?:\S+: line \d+: +\d+ )?Killed(?:$|\s{2,})|(?:it/s|s/it)\]\s*Killed$|^\[\d+\]\s+\d+ killed\s|"
        r"(?<!code is -9 \()\bSIGKILL\b(?!;| for| within|\) *,)|\b[Ss]ignal 9\b",
        ("Killed", " killed ", "SIGKILL", "ignal 9"),
    ),
    Sign(
        "host-allocation-failed",
        r"DefaultCPUAllocator: (?:can't|not enough)|\bunable to mmap \d+ bytes|\[Errno 12\] Cannot allocate memory|"
        r"^MemoryError\b|std::bad_alloc|\bNV_ERR_NO_MEMORY\b",
        ("DefaultCPUAllocator", "unable to mmap", "[Errno 12]", "MemoryError", "bad_alloc", "NV_ERR_NO_MEMORY"),
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
