"""What people write of failures in titles, notes and change logs, where no line of a log is quoted.

A pattern holds two things that stand in one line, in either order: what it is about, and what went wrong with it.
"""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.model import Family
from sgdiag.releases.signs.sign import Sign


class Wording(NamedTuple):
    """``about`` and ``trouble`` are patterns for the two; ``hints`` are literals as a ``Sign`` has them."""

    family: Family
    about: str
    trouble: str
    hints: tuple[str, ...]


_STOPS = (
    r"[Hh]ang|[Hh]ung\b|[Ss]tuck|[Ss]tall|[Ff]reez|[Dd]eadlock|[Ww]edge|[Uu]nresponsive"
    r"|[Bb]locks? in\b|[Ss]tops? responding"
)
_FAILS = rf"{_STOPS}|[Cc]rash|[Ff]ail|[Ee]rrors?\b|\b[Dd]ied\b|[Tt]ime(?:d|s)?[ -]?out|\bOOM|[Aa]ssert"
_GARBLES = r"[Gg]arbage|[Ww]rong (?:output|result)|[Gg]ibberish|[Cc]orrupt|[Ii]ncorrect"
_CURED = r"\b(?:[Ff]ix(?:es|ed)?|[Ss]olve[sd]?|[Rr]esolve[sd]?|[Hh]elp(?:s|ed)|[Aa]void(?:s|ed))\b"
_EXHAUSTED = r"\bOOM|[Oo]ut of (?:\w+ )?memory|[Oo]ut-of-memory"
_EXHAUSTED_HINTS = ("OOM", "ut of ", "ut-of-memory")
_DRAFTING = (
    r"[Ss]peculati|\b[Ee]agle|\bEAGLE|\bMTP\b|\bNEXTN\b|\bNextN\b|DFLASH|DFlash|DSpark|DSPARK|\bdraft model|\bNGRAM\b"
)
_DRAFTING_HINTS = (
    *("peculati", "eagle", "Eagle", "EAGLE", "MTP", "NEXTN", "NextN", "NGRAM", "draft model"),
    *("DFLASH", "DFlash", "DSpark", "DSPARK"),
)

WORDINGS: tuple[Wording, ...] = (
    Wording(
        "spec-acceptance",
        r"\b[Aa]ccept(?:ance|ed)?[ _-]?(?:token |draft )?(?:len\w*|rate|ratio|tokens?)\b|\b[Aa]cc[ _]?len"
        r"|\b[Dd]raft.{0,60}\b(?:accepted|rejected)",
        r"\b[Ll]ow(?:er)?\b|[Dd]rops?\b|[Dd]egrad|[Dd]ecreas|\b[Pp]oor|[Cc]ollaps|[Rr]ejected|\bonly\b"
        r"|[:= ]1\.[0-2]\d*\b|(?:[Nn]ever|[Aa]lmost no|\b[Ff]ew|\b0)\b.{0,20}\baccept",
        ("cc_len", "cclen", "cc len", "ccept", "raft"),
    ),
    Wording(
        "spec-tensor-unpacked",
        _DRAFTING,
        r"to unpack\b",
        ("to unpack",),
    ),
    Wording(
        "spec-shape-mismatch",
        _DRAFTING,
        r"(?:[Ss]hape|[Ss]ize|[Dd]im\w*|[Hh]idden|[Bb]uffer|[Ll]ogits)\b.{0,40}(?:mismatch|not fit|differ"
        r"|must match|multiplied|not match)",
        _DRAFTING_HINTS,
    ),
    Wording(
        "spec-slower-than-plain",
        _DRAFTING,
        r"[Ss]low(?:er|-?down|s)\b|negative speed-?up|\b[Nn]o (?:speed-?up|gain|benefit|improvement)|\b(?:worse"
        r"|lower) than\b|\b0\.\d+ ?x\b|[Rr]egression|[Hh]urts?\b|[Dd]ecreases?\b.{0,20}(?:TPS|tok)|(?:[Tt]hroughput"
        r"|[Pp]erformance|[Ss]peed-?up) .{0,30}(?:drop|degrad|decreas|lower|less|below|not reach|inconsistent)",
        _DRAFTING_HINTS,
    ),
    Wording(
        "flashinfer-allreduce-fusion",
        r"(?:[Aa]ll[- ]?[Rr]educe[- _]|AR )[Ff]usion",
        rf"{_FAILS}|{_GARBLES}|{_CURED}",
        ("usion",),
    ),
    Wording(
        "custom-allreduce",
        r"[Cc]ustom[ _-][Aa]ll[ _-]?[Rr]educe|[Qq]uick ?[Aa]ll-?[Rr]educe",
        rf"{_FAILS}|{_GARBLES}|{_CURED}|\bworks?\b",
        ("ustom", "uick"),
    ),
    Wording(
        "kv-accounting-leak",
        r"kv_pool|\bKV (?:cache|pool|slots?|pages?)|[Tt]oken (?:pool|slots?|usage)|[Mm]amba (?:slots?|pool|cache)"
        r"|[Rr]adix ?(?:[Cc]ache|tree)|\b[Ss]lots?\b|leaked_\w+_pages=\{\d",
        r"\b[Ll]eak|[Dd]ouble[- ]free|[Ff]reed twice|[Nn]ever (?:freed|released|returns to)",
        ("leak", "Leak", "ouble", "reed", "released", "returns to"),
    ),
    Wording(
        "hicache",
        r"[Hh]i[Cc]ache|[Hh]i[Rr]adix|[Hh]ierarchical[_ -](?:KV )?[Cc]ache|\bload_back|\bwrite_backup"
        r"|[Hh]ost (?:KV )?pool|HostKVCache|\b[Hh]ost indices",
        rf"{_FAILS}|\b[Oo]om\b|{_GARBLES}|[Nn]ever hit|KeyError|[Ll]eak|[Nn]ot enough|[Ss]egfault",
        ("icache", "iCache", "iradix", "iRadix", "ierarchical", "load_back", "write_backup", "ost ", "HostKV"),
    ),
    Wording(
        "sm120-or-shared-memory-limit",
        r"\b[Ss][Mm][ _]?1[0-2]\d[af]?\b|\bRTX ?(?:50\d0|PRO ?\d{4})|\b5090\b|\bGB10\b|DGX Spark|Blackwell|\bL40S?\b",
        r"[Nn]ot (?:yet )?(?:support|compatible)|[Uu]nsupported|[Nn]o kernel|\b[Ff]ails?\b|[Cc]rash|[Rr]equires?\b"
        r"|\b[Nn]eeds\b|[Ss]hared memory|OutOfResources",
        ("SM", "sm", "Sm", "sM", "RTX", "5090", "GB10", "DGX Spark", "Blackwell", "L40"),
    ),
    Wording(
        "flashinfer-jit",
        r"[Ff]lash[Ii]nfer|[Dd]eep_?[Gg]emm|DeepGEMM|\bJIT\b|\bjit\b|\bcubins?\b",
        r"(?:[Cc]ompil|\b[Bb]uild|\bnvcc|\bninja|\bcubin|[Dd]ownload).{0,60}(?:[Ff]ail|[Ee]rror|not found|missing"
        r"|[Hh]ang|[Mm]inutes|[Ss]tuck"
        r"|lock)|(?:[Ff]ail|[Ee]rror|[Hh]ang|[Mm]inutes|[Ss]tuck).{0,60}(?:[Cc]ompil|\b[Bb]uild|\bnvcc|\bninja"
        r"|\bcubin)",
        ("lashinfer", "lashInfer", "eepGEMM", "eepgemm", "eep_gemm", "eepGemm", "eep_Gemm", "JIT", "jit", "cubin"),
    ),
    Wording(
        "dp-attention-or-deepep",
        r"[Dd]eep_?[Ee][Pp]\b|\b[Dd][Pp][- _][Aa]ttention|[Mm][Ll][Pp][_ -][Ss]ync|NVSHMEM|nvshmem"
        r"|\b[Ii]dle (?:batch|rank)|\bDP ranks?\b|IDLE batch|\bEP ?MoE",
        rf"{_FAILS}|{_GARBLES}",
        ("eep", "ttention", "sync", "Sync", "NVSHMEM", "nvshmem", "dle batch", "dle rank", "IDLE ", "MoE", "DP rank"),
    ),
    Wording(
        "pd-disaggregation",
        r"\bP/?D\b|[Dd]isaggregat|\b(?:[Pp]refill|[Dd]ecode) (?:node|instance|server|worker)|[Mm]ooncake|\bNIXL\b"
        r"|\b[Tt]ransfer [Ee]ngine|\bKV transfer",
        rf"{_FAILS}|[Ww]aiting for KV|\bdead\b|[Ll]os(?:es?|t) (?:the )?connection|[Uu]nreachable",
        ("PD", "P/D", "isaggregat", "refill ", "ecode ", "ooncake", "NIXL", "KV transfer", "ransfer "),
    ),
    Wording(
        "gpu-memory-held-by-orphan",
        r"\b(?:GPU|[Dd]evice|[Gg]raphics) memory\b|\bVRAM\b",
        r"\b(?:[Oo]rphan|[Zz]ombie|[Ll]eft-?over|[Ss]tale|[Ll]ingering|[Pp]revious|[Dd]ead|[Kk]illed|pkill|kill -9"
        r"|Ctrl-C)\b.{0,60}"
        r"(?:hold|held|keep|occup|not free|not release|remain|stay|leak)|[Ss]urviv.{0,60}(?:hold|held|keep|occup)"
        r"|(?:hold|held|keep|occup|not freed|not released|remain|stay)\w*.{0,60}\b(?:orphan|zombie|killed|dead"
        r"|exit(?:ed|s))",
        ("GPU memory", "VRAM", "evice memory", "raphics memory"),
    ),
    Wording(
        "gpu-memory-unbalanced",
        r"\b[Mm]emory\b",
        r"\b(?:[Uu]nbalance|[Ii]mbalance|[Ii]nbalance)",
        ("nbalance", "mbalance"),
    ),
    Wording(
        "kv-pool-hybrid-state",
        r"[Mm]amba|[Ll]inear[- ]attention|\bstate (?:pool|cache)|[Hh]ybrid",
        r"[Nn]o room|[Tt]oo small|[Nn]ot enough|[Ii]nsufficient|[Nn]egative",
        ("amba", "inear", "state pool", "state cache", "ybrid"),
    ),
    Wording(
        "graph-capture-out-of-memory",
        _EXHAUSTED,
        r"[Cc]aptur|\b[Gg]raphs?\b",
        _EXHAUSTED_HINTS,
    ),
    Wording(
        "weight-load-out-of-memory",
        _EXHAUSTED,
        r"[Ll]oad(?:s|ed|ing)?[ _](?:the )?(?:[Mm]odel|[Ww]eight|[Cc]heckpoint)|[Mm]odel load|\bat load\b"
        r"|[Ww]eights? (?:load|alone)",
        _EXHAUSTED_HINTS,
    ),
    Wording(
        "kv-pool-no-room",
        r"\bKV[ -]?(?:cache|pool)|\bmax_total_num_tokens?\b",
        r"\b[Nn]o (?:room|(?:GPU )?memory|space)\b|[Nn]egative|(?:\bis|=) ?0\b|[Nn]ot enough|[Ii]nsufficient",
        ("KV", "total_num_token"),
    ),
    Wording(
        "host-memory-killed",
        r"\bRAM\b|\b[Hh]ost memory|\b[Ss]ystem memory|\bcgroup|\b[Cc]ontainer\b|\b[Pp]od\b|\b[Kk]ernel\b",
        r"\b[Kk]illed\b|[Ee]victed|memory limit|OOM-?[Kk]ill|[Ee]xhausted|\b137\b|SIGKILL|[Oo]ut of memory",
        ("illed", "victed", "memory limit", "OOM", "xhausted", "137", "SIGKILL", "ut of memory"),
    ),
    Wording(
        "nccl-shared-memory-or-out-of-memory",
        r"\bdev/shm|\bshm[-_ ]size|\bshm\b|--ipc[= ]host|\bipc: host",
        rf"NCCL|\bonly \d+|\b[Ff]ull\b|[Tt]oo small|[Nn]o space|{_CURED}|[Ff]ail",
        ("shm", "ipc"),
    ),
    Wording(
        "nccl-p2p-hang",
        r"NCCL_P2P_\w+|\bIOMMU\b|\bACS\b|[Pp]eer-to-peer|\bP2P\b",
        rf"{_STOPS}|{_CURED}",
        ("P2P", "IOMMU", "ACS", "eer-to-peer"),
    ),
    Wording(
        "nccl-watchdog-timeout",
        r"NCCL\b|\bnccl\b|[Cc]ollective|ALLREDUCE|ALLGATHER",
        r"[Ww]atchdog|[Tt]ime(?:d|s)?[ -]?out",
        ("NCCL", "nccl", "ollective", "ALLREDUCE", "ALLGATHER"),
    ),
    Wording(
        "nccl-version-fabric-or-network",
        r"(?:GLOO|NCCL)_SOCKET_IFNAME|[Nn]etwork interface|[Ff]abric-?[Mm]anager|\bIMEX\b|NCCL_IB_\w+"
        r"|NCCL_NVLS_ENABLE|InfiniBand|\bNCCL version",
        rf"{_FAILS}|{_CURED}|[Nn]ot running|had to|must be|[Rr]efused|[Mm]ismatch|\b[Ww]rong\b|[Cc]annot reach",
        ("SOCKET_IFNAME", "etwork interface", "abric", "IMEX", "NCCL_IB_", "NVLS_ENABLE", "InfiniBand", "NCCL version"),
    ),
    Wording(
        "graph-capture-failed-not-memory",
        r"\b[Gg]raphs? captur|[Cc]aptur\w+ (?:the )?(?:CUDA |cuda |HIP )?graphs?",
        r"[Ff]ail|[Cc]rash|[Ee]rror\b|[Hh]ang|[Aa]ssert",
        ("aptur",),
    ),
    Wording(
        "runtime-out-of-memory-or-retraction",
        rf"{_EXHAUSTED}|\b[Rr]etract",
        r"[Pp]refill|[Dd]ecod|\b[Ss]erving|[Uu]nder (?:\w+ )?load\b|\b[Rr]equests?\b|[Ll]ong (?:prompt|context)"
        r"|[Cc]oncurren|[Ii]nference",
        (*_EXHAUSTED_HINTS, "etract"),
    ),
    Wording(
        "illegal-memory-access",
        r"\bIMA\b|[Ii]llegal (?:memory )?access|[Mm]isaligned address",
        rf"{_FAILS}|CUDA|kernel",
        ("IMA", "llegal ", "isaligned"),
    ),
    Wording(
        "scheduler-watchdog-or-health",
        r"\b(?:[Ss]erver|[Ss]cheduler|[Dd]etokenizer|[Ee]ngine)\b|/health|\b[Hh]ealth[- ]?check",
        rf"{_STOPS}|[Nn]ot respond|\b503\b|[Nn]o response|[Ww]atchdog",
        ("erver", "cheduler", "etokenizer", "ngine", "ealth"),
    ),
)
"""The more specific ones first: a sentence may speak of several things."""

_NO_PROSE = (
    r"^(?!\s{4}|\s*File \"|server_args=|.*(?:launch_server|sglang serve |llama-server|[Oo]llama|vllm|vLLM)"
    r"|\W*(?:INFO|DEBUG)\b)"
)


def sign_of(family: Family) -> str:
    return f"told-{family}"


SIGNS: tuple[Sign, ...] = tuple(
    Sign(
        sign_of(one.family),
        rf"{_NO_PROSE}(?=.*(?:{one.about}))(?=.*(?:{one.trouble}))",
        one.hints,
    )
    for one in WORDINGS
)
