"""What keeps a server from starting at all: ports, hardware, the model's files, the installation, its arguments."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

SIGNS: tuple[Sign, ...] = (
    Sign(
        "port-in-use",
        r"[Aa]ddress already in use|Port is already in use"
        r"|\b(?P<port_name>\w{1,40}_port|port_base) at (?P<port>\d+) is not available in"
        r"|[Pp]ort (?P<number>\d+) is (?:already )?in use",
        (" in use", "ot available"),
    ),
    Sign("port-bind", r"attempting to bind on address \('[^']*', (?P<port>\d+)", ("attempting to bind",)),
    Sign(
        "port-listen",
        r"server socket has failed to (?:listen|bind).*?(?:port: |:)(?P<port>\d{2,5})\b",
        (" socket has ",),
    ),
    Sign(
        "port-holder",
        r"is used by a process already\.(?:.*\bpid=(?P<pid>\d+))?",
        ("used by a process already",),
    ),
    Sign(
        "gpu-ecc",
        r"[Uu]ncorrectable (?:ECC|NVLink|double bit) error|ErrorECCUncorrectable",
        ("ncorrectable",),
    ),
    Sign("gpu-xid", r"\bXid (?:\([^)]{1,40}\):? )?(?P<xid>\d+)", ("Xid ",)),
    Sign(
        "gpu-lost",
        r"fallen off the bus|GPU is lost|Unable to determine the device handle for GPU|GPU requires reset"
        r"|hardware error during execution|Invalid access of peer GPU memory over nvlink or a hardware error",
        ("off the bus", "GPU is lost", "GPU requires reset", "hardware error", "nable to "),
    ),
    Sign(
        "model-unsupported",
        r"Model architectures? .*(?:are|is) not supported|Transformers does not recognize this architecture"
        r"|Should have a `model_type` key|Model architectures .* failed to be inspected"
        r"|Unrecognized configuration class",
        (
            "Model architecture",
            "does not recognize this architecture",
            "`model_type` key",
            "Unrecognized configuration class",
        ),
    ),
    Sign(
        "model-refused",
        r"GatedRepoError: |gated repo|Access to model \S+ is restricted|40[13] Client Error.*huggingface"
        r"|Invalid (?:user token|username or password)",
        ("gated repo", "is restricted", "Client Error", "Invalid user", "Error: "),
    ),
    Sign(
        "model-missing",
        r"is not a local folder and is not a valid model identifier|RepositoryNotFoundError: "
        r"|Repo id must be in the form|does not appear to have a file named|Cannot find any model weights"
        r"|LocalEntryNotFoundError: |We couldn't connect to '"
        r"|No such file or directory: '[^']*(?:config\.json|\.safetensors(?:\.index\.json)?|tokenizer\S*|\.bin|\.gguf)'"
        r"|Incorrect path_or_model_id|Can't load (?:the configuration of|tokenizer for|config for)",
        (
            "valid model identifier",
            "Repo id must be",
            "does not appear to have a file",
            "Cannot find any model weights",
            "We couldn't connect to",
            "Incorrect path_or_model_id",
            "Can't load ",
            "Error: ",
            "No such file or directory: ",
        ),
    ),
    Sign(
        "model-damaged",
        r"SafetensorError: |Error while deserializing header|PytorchStreamReader failed",
        ("deserializing header", "PytorchStreamReader", "Error: "),
    ),
    Sign(
        "model-does-not-fit-options",
        r"Unknown quantization method|quantization method \S+ is not supported"
        r"|does not match the quantization method"
        r"|Quantization method specified in the model config|`trust_remote_code=True`"
        r"|is not divisible by (?:weight quantization|tp_?size)|must be divisible by (?:tensor|tp)"
        r"|is greater than the derived context_length",
        ("uantization method", "divisible by", "`trust_remote_code=True`", "derived context_length"),
    ),
    Sign(
        "arguments-refused",
        r"launch_server(?:\.py)?: error: (?P<error>.+)|^sglang serve: error: (?P<other>.+)",
        ("error: ",),
    ),
    Sign(
        "install-broken",
        r"^(?:\w+\.)*(?:ModuleNotFound|Import|PackageNotFound)Error: "
        r"|undefined symbol: (?P<symbol>\S+)|version `(?P<glib>GLIBC\w*_[\d.]+)' not found"
        r"|is installed with version \S+, which is less than the minimum required version"
        r"|Could not load any common_ops library",
        (
            "undefined symbol",
            "less than the minimum required",
            "Could not load any common_ops library",
            "Error: ",
            "not found",
        ),
    ),
    Sign(
        "driver-broken",
        r"invalid device ordinal|driver version is insufficient|The NVIDIA driver on your system is too old"
        r"|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device|CUDA driver initialization failed"
        r"|CUDA unknown error|forward compatibility was attempted",
        (
            "driver version is insufficient",
            "No CUDA GPUs",
            "no CUDA-capable",
            "CUDA unknown error",
            "forward compatibility was",
            "NVIDIA driver",
            "CUDA driver ",
            "invalid device ",
        ),
    ),
)
