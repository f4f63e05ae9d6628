"""What each supported SGLang release needs to serve on a CPU, as data.

`BASE_PACKAGES` make one environment for all releases; a `Release` names what lies in front of it. Every version is
exact, indirect dependencies too, so that a lab built next year behaves like one built today.
"""

from __future__ import annotations

import msgspec

from sgdiag.lab.errors import LabError

PYTHON = "python3.11"
TORCH = "torch==2.13.0"

BASE_PACKAGES: tuple[str, ...] = (
    "aiohappyeyeballs==2.7.1",
    "aiohttp==3.14.5",
    "aiosignal==1.4.0",
    "annotated-doc==0.0.7",
    "annotated-types==0.8.0",
    "anyio==4.16.0",
    "apache-tvm-ffi==0.1.11",
    "asttokens==3.0.2",
    "attrs==26.1.0",
    "blobfile==3.0.0",
    "certifi==2026.10.19.post1",
    "cffi==2.1.1",
    "charset-normalizer==3.5.3",
    "click==8.5.1",
    "compressed-tensors==0.18.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "distro==1.9.0",
    "easydict==1.14",
    "einops==0.8.2",
    "executing==2.3.0",
    "fastapi==0.165.0",
    "filelock==4.3.1",
    "frozenlist==1.8.0",
    "fsspec==2026.9.0",
    "gguf==0.19.0",
    "h11==0.16.0",
    "hf-xet==1.8.0",
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "huggingface_hub==1.33.0",
    "idna==3.20",
    "interegular==0.3.3",
    "ipython==9.18.1",
    "ipython_pygments_lexers==1.1.1",
    "jedi==0.20.1",
    "Jinja2==3.1.6",
    "jiter==0.19.0",
    "jsonschema-specifications==2025.9.1",
    "jsonschema==4.26.0",
    "llguidance==1.9.1",
    "loguru==0.7.3",
    "lxml==6.1.3",
    "markdown-it-py==4.3.0",
    "MarkupSafe==3.0.4",
    "matplotlib-inline==0.2.2",
    "mdurl==0.1.2",
    "mpmath==1.3.0",
    "msgspec==0.23.0",
    "multidict==7.2.1",
    "multiprocess==0.70.19",
    "networkx==3.6.1",
    "ninja==1.13.2",
    "numpy==2.4.6",
    "nvidia-ml-py==13.615.71",
    "openai-harmony==0.0.4",
    "openai==2.6.1",
    "opentelemetry-api==1.45.2",
    "orjson==3.13.0",
    "packaging==26.4",
    "pandas==3.1.1",
    "parso==0.8.7",
    "partial-json-parser==0.2.1.1.post7",
    "pexpect==4.9.0",
    "pillow==13.0.0",
    "prometheus_client==0.26.0",
    "prompt_toolkit==3.0.53",
    "propcache==0.5.4",
    "psutil==7.2.2",
    "ptyprocess==0.7.0",
    "pure_eval==0.2.4",
    "py-spy==0.4.3",
    "pyarrow==26.0.1",
    "pybase64==1.5.1",
    "pycparser==3.12",
    "pycryptodomex==3.24.2",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "Pygments==2.21.0",
    "python-dateutil==4.0.0",
    "python-multipart==0.0.34",
    "PyYAML==6.0.4",
    "pyzmq==27.3.0",
    "referencing==0.37.0",
    "regex==2026.11.19",
    "requests==2.34.2",
    "rich==15.0.0",
    "rpds-py==2026.9.1",
    "safetensors==0.8.0",
    "scipy==1.17.1",
    "sentencepiece==0.2.3",
    "setproctitle==1.3.8",
    "shellingham==1.5.4",
    "sniffio==1.3.1",
    "soundfile==0.13.1",
    "stack-data==0.6.3",
    "starlette==1.10.0",
    "sympy==1.14.0",
    "tiktoken==0.14.0",
    "tokenizers==0.22.2",
    "tqdm==4.70.1",
    "traitlets==5.16.1",
    "transformers==5.12.1",
    "triton==3.9.0",
    "typer==0.29.2",
    "typing-inspection==0.4.5",
    "typing_extensions==4.16.0",
    "tzdata==2026.6",
    "urllib3==2.8.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
    "watchfiles==1.3.0",
    "wcwidth==0.9.4",
    "xgrammar==0.2.1",
    "xxhash==4.1.0",
    "yarl==1.25.1",
    "zstandard==0.25.0",
)


class Release(msgspec.Struct, frozen=True):
    """One SGLang release: its packages, and how its server is started on a CPU.

    `attention` and `env` hold for a plain server, `speculative_attention` and `speculative_env` for a speculating one;
    `tree_env` extends the latter when more than one branch is drafted (top-k above 1). `interpreted` says that Triton's
    interpreter runs the speculative kernels: about 2 tokens/s, so keep generations short.
    """

    version: str
    packages: tuple[str, ...]
    attention: str
    speculative_attention: str
    env: dict[str, str]
    speculative_env: dict[str, str]
    tree_env: dict[str, str]
    interpreted: bool

    @property
    def overlay(self) -> tuple[str, ...]:
        """Everything that lies in front of the base environment, SGLang first."""
        return (f"sglang=={self.version}", *self.packages)


# Their metrics middleware reads a path off every route, which the routers of newer versions lack.
_WEB_BEFORE_0_5_18 = ("fastapi==0.116.1", "starlette==0.47.3")


def _before_0_5_18(version: str, *packages: str) -> Release:
    """No CPU branch in the speculative code: its CUDA branch runs, on Triton's interpreter and the shims."""
    return Release(
        version=version,
        packages=(*_WEB_BEFORE_0_5_18, *packages),
        attention="torch_native",
        speculative_attention="triton",
        env={"SGDIAG_LAB_SHIMS": "streams"},
        speculative_env={
            "SGDIAG_LAB_SHIMS": "streams,tree",
            "SGLANG_ENABLE_SPEC_V2": "1",
            "TRITON_INTERPRET": "1",
        },
        # The v2 worker of these releases drafts one branch only; the v1 worker drafts trees.
        tree_env={"SGLANG_ENABLE_SPEC_V2": "0"},
        interpreted=True,
    )


def _since_0_5_18(version: str, *packages: str) -> Release:
    return Release(
        version=version,
        packages=packages,
        attention="intel_amx",
        speculative_attention="intel_amx",
        env={},
        speculative_env={},
        tree_env={},
        interpreted=False,
    )


RELEASES: dict[str, Release] = {
    release.version: release
    for release in (
        _before_0_5_18("0.5.9", "transformers==4.57.1", "tokenizers==0.22.2", "huggingface_hub==0.36.0"),
        _before_0_5_18("0.5.12.post1"),
        _before_0_5_18("0.5.15.post1"),
        _since_0_5_18("0.5.20"),
        _since_0_5_18(
            "0.5.23",
            "transformers==5.19.0",
            "tokenizers==0.23.2",
            "openai==2.8.0",
            "xgrammar==0.2.7",
            "sentencepiece==0.2.1",
        ),
    )
}
NEWEST = "0.5.23"


def find(version: str) -> Release:
    """The release of that exact version; LabError with the known ones otherwise."""
    try:
        return RELEASES[version]
    except KeyError:
        raise LabError(f"the lab does not know SGLang {version}; choose one of {', '.join(RELEASES)}") from None
