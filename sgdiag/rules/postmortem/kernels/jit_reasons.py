"""Why kernels that are built when they are first needed cannot be built, by the compiler's own words."""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.model import Advice

PREBUILT = Advice(
    "install the kernels ready-made, in the version of flashinfer-python",
    "pip install flashinfer-cubin==VERSION flashinfer-jit-cache==VERSION",
    "nothing is built or fetched at run time",
)
CLEAN_CACHE = Advice(
    "with no server running, clear what is half built", "rm -rf ~/.cache/flashinfer", "stale locks and files are gone"
)


class Reason(NamedTuple):
    """Why a build fails, by the compiler's own words."""

    sign: str
    title: str
    cause: str
    advice: Advice


REASONS = (
    Reason(
        "jit-tool-missing",
        "{what} is missing",
        "{what} was not found, and without it no kernel can be built",
        Advice(
            "install the CUDA toolkit of torch's CUDA version, and ninja, and name the toolkit",
            "pip install ninja; export CUDA_HOME=/usr/local/cuda PATH=/usr/local/cuda/bin:$PATH",
            "which nvcc ninja finds both",
        ),
    ),
    Reason(
        "jit-compiler-killed",
        "the compiler was killed",
        "{what} was killed, most likely for lack of host memory: the build starts one compiler for each CPU",
        Advice("build with fewer compilers at a time", "MAX_JOBS=4", "less host memory is needed at once"),
    ),
    Reason(
        "jit-header-missing",
        "the header {what} is missing",
        "{what} is not on the compiler's include path: the toolkit is incomplete, or its headers lie elsewhere (conda, "
        "nvidia-* wheels)",
        Advice(
            "install the whole toolkit, or name the folder that holds the header",
            'FLASHINFER_EXTRA_CUDAFLAGS="-I/path/to/include"',
            "the compiler finds it",
        ),
    ),
    Reason(
        "jit-architecture-unknown",
        "nvcc does not know {what}",
        "the nvcc that was found is older than the GPU: it does not know {what}",
        Advice(
            "use a newer toolkit (12.8 for SM120, 12.9 for the f variants)",
            "export CUDA_HOME=/usr/local/cuda-12.9",
            "nvcc --version says 12.9",
        ),
    ),
    Reason(
        "jit-compiler-refused",
        "nvcc refuses: {what}",
        "nvcc and its host compiler or its arguments do not go together: {what}",
        Advice("name a host compiler that this nvcc supports", "export CXX=g++-12 NVCC_PREPEND_FLAGS='-ccbin g++-12'"),
    ),
    Reason(
        "jit-source-refused",
        "the compiler refuses the kernel's source: {what}",
        "the toolkit is older or newer than what the kernels were written for, or headers of two versions are mixed: "
        "{what}",
        Advice(
            "use the toolkit of torch's CUDA version, and no other one's headers",
            "export CUDA_HOME=/usr/local/cuda; unset CPATH CPLUS_INCLUDE_PATH",
            "nvcc --version says the same as torch.version.cuda",
        ),
    ),
    Reason(
        "jit-cache-unusable",
        "the folder for built kernels cannot be used: {what}",
        "{what} is locked by another or a dead process, belongs to another user, or its disk is full or read-only",
        Advice(
            "see who owns it and what holds its locks; give each user a folder of their own",
            "ls -l ~/.cache/flashinfer; lsof +D ~/.cache/flashinfer; export FLASHINFER_WORKSPACE_BASE=/path/with/space",
            "the build can write there",
        ),
    ),
    Reason(
        "jit-not-linked",
        "the built kernel cannot be linked or loaded: {what}",
        "the build is half done, or was made against another torch or CUDA: {what}",
        CLEAN_CACHE,
    ),
    Reason(
        "symbol-missing",
        "the built kernel does not find {what}",
        "the module was built against another driver, CUDA or torch than it is loaded into: {what} is not there",
        CLEAN_CACHE,
    ),
    Reason(
        "jit-forbidden",
        "a kernel is not in the cache, and building it is forbidden",
        "{what} is set, and the module is not among the ready-made ones",
        Advice("allow the build", "unset FLASHINFER_DISABLE_JIT", "the missing module is built"),
    ),
)
