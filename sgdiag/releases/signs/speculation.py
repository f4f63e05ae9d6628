"""Draft models: shapes, acceptance."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

SPECULATIVE_NAMES = (
    "eagle",
    "nextn",
    "_mtp",
    "mtp_",
    "ngram_worker",
    "ngram_info",
    "dflash",
    "dspark",
    "draft_extend",
    "speculative",
)
"""What the files and functions of speculative decoding have in their names, in lower case."""

_SHAPES = (
    Sign(
        "sizes-differ",
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)"
        r"(?: at non-singleton dimension (?P<dimension>\d+))?",
        (" size of t",),
    ),
    Sign(
        "expanded-sizes-differ",
        r"The expanded size of the tensor \((?P<a>\d+)\) must match the existing size \((?P<b>\d+)\)"
        r"(?: at non-singleton dimension (?P<dimension>\d+))?",
        (" size of t",),
    ),
    Sign(
        "joined-sizes-differ",
        r"Sizes of tensors must match except in dimension (?P<dimension>\d+)\. "
        r"(?:Expected size (?P<a>\d+) but got size (?P<b>\d+)|Got (?P<old_a>\d+) and (?P<old_b>\d+))",
        ("Sizes of tensors must match",),
    ),
    Sign(
        "matrices-differ",
        r"mat1 and mat2 shapes cannot be multiplied \((?P<rows>\d+)x(?P<a>\d+) and (?P<b>\d+)x(?P<columns>\d+)\)"
        r"|same reduction dim, but got \[(?P<meta_rows>\d+), (?P<meta_a>\d+)\] X "
        r"\[(?P<meta_b>\d+), (?P<meta_columns>\d+)\]",
        ("mat1 and mat2 shapes", "same reduction dim"),
    ),
    Sign(
        "shape-invalid",
        r"shape '(?P<shape>\[[-\d, ]+\])' is invalid for input of size (?P<size>\d+)"
        r"|shape mismatch: value tensor of shape (?P<value>\[[\d, ]+\]) cannot be broadcast to indexing result of "
        r"shape (?P<place>\[[\d, ]+\])",
        ("is invalid for input of size", "ismatch"),
    ),
    # The kernels that SGLang builds itself check the tensors they are given.
    Sign(
        "kernel-sizes-differ",
        r"Size mismatch for shape#(?P<dimension>\d+)(?:\('\w+'\))?: expected (?P<a>\d+) but got (?P<b>\d+)",
        ("ismatch",),
    ),
    Sign(
        "shapes-differ",
        r"output with shape \[[\d, ]*\] doesn't match the broadcast|shape of the mask \[[\d, ]*\] at index"
        r"|split_sizes to sum exactly to|indexing tensors could not be broadcast together"
        r"|stack expects each tensor to be equal size|\) exceeds dimension size \("
        r"|Expected size for first two dimensions of batch2|Tensors must have same number of dimensions"
        r"|create tensor with negative dimension|selected index k out of range|must have same slice shapes"
        r"|Tensor match failed for Tensor",
        (
            "doesn't match the broadcast",
            "shape of the mask",
            "to sum exactly to",
            "could not be broadcast together",
            "stack expects each tensor",
            "exceeds dimension size",
            "dimensions of batch2",
            "same number of dimensions",
            "negative dimension",
            "selected index k",
            "same slice shapes",
            "Tensor match failed",
        ),
    ),
    # Attention backends name a kind of step that they do not know; the numbers are those of ForwardMode since 0.4.
    Sign(
        "forward-mode-unknown",
        r"(?:[Ii]nvalid|[Uu]nsupported|[Uu]nexpected|[Uu]nknown) forward[ _]mode"
        r"(?:.*?(?P<mode>TARGET_VERIFY|DRAFT_EXTEND\w*|(?<![\w.])[5-7]\b))?",
        ("forward mode", "forward_mode"),
    ),
    Sign(
        "weight-shape-differs",
        r"Attempted to load weight \(torch\.Size\((?P<loaded>\[[\d, ]*\])\)\) into parameter "
        r"\(torch\.Size\((?P<parameter>\[[\d, ]*\])\)\)",
        ("Attempted to load weight",),
    ),
    Sign(
        "tensor-is-none",
        r"cat\(\) received an invalid combination of arguments - got \(NoneType"
        r"|expected Tensor as element (?P<element>\d+) in argument 0, but got NoneType"
        r"|'NoneType' object has no attribute '(?P<attribute>hidden_states|topk_p|topk_index|shape)'"
        r"|local variable 'aux_\w+' (?:referenced before assignment|where it is not associated)",
        ("cat() received an invalid", "expected Tensor as element", "variable 'aux_", "object has no attribute"),
    ),
    Sign(
        "target-without-drafts",
        r"'(?P<model>\w+)' object has no attribute '(?P<method>set_(?:eagle3|dflash)_layers_to_capture"
        r"|get_embed_and_head|set_embed_and_head|set_embed)'",
        ("object has no attribute",),
    ),
    Sign(
        "unpacked",
        r"(?P<which>too many|not enough) values to unpack \(expected (?P<expected>\d+)(?:, got (?P<got>\d+))?\)",
        ("values to unpack",),
    ),
    Sign(
        "index-out-of-range",
        r"Assertion [`'].{0,120}index out of bounds"
        r"|index (?P<index>-?\d+) is out of bounds for dimension \d+ with size (?P<size>\d+)"
        r"|(?:gather_kernel|indexSelect).{0,260}Assertion",
        ("is out of bounds for dimension", "indexSelect", "gather_kernel", "Assertion "),
    ),
)

_CONTEXT = (
    Sign(
        "speculative-frame",
        r"speculative/\w{1,60}\.py|(?:eagle|nextn|_mtp|ngram_info|ngram_worker|dflash|dspark)\w{0,60}\.py\b"
        r"|draft_extend|forward_batch_speculative_generation",
        ("draft_extend", ".py", "peculative"),
    ),
    Sign("slots-allocated", r"\balloc_(?:paged_)?token_slots", ("token_slots",)),
    Sign("layers-unpacked", r"\baux_hidden_states\s*=", ("aux_hidden_states",)),
    Sign(
        "draft-loaded",
        r"Load weight end\..*\btype=(?P<model>\w*(?:Eagle|EAGLE|NextN|MTP|DFlash|DSpark|Draft)\w*)",
        ("Load weight end",),
    ),
    Sign("speculative-flag", r"--speculative-(?P<flag>[a-z-]+)(?:[ =](?P<value>\S+))?", ("peculative",)),
)

_ACCEPTANCE = (
    # Whole logs have the figure on their decode lines, which the log's facts tell; this is for what others print of it.
    Sign(
        "accept-length-low",
        r"[Aa]ccept(?:ance)?[ _]len(?:gth)?(?:\"?\s*[:=]|\{[^}]{0,200}\}| (?:is|was|of|stays?|remains?|only|around|"
        r"about|at|always|just)\b){1,4}\s*(?P<length>1(?:\.[0-5]\d*)?)(?![\d.])",
        ("ccept",),
    ),
    # In prose, or a benchmark's heading.
    Sign(
        "speculation-slower",
        r"(?:[Ss]peculat(?:ive|ion)|(?:EAGLE|[Ee]agle)-?3?|MTP|NEXTN|DFLASH|draft model)(?![\w=/-])"
        r".{0,80}?\b(?:slower|slow-?down"
        r"|no speed-?up|(?:throughput|performance) (?:\w+ ){0,2}(?:drop|decreas|degrad|reduc|regress|fell|fall)"
        r"|(?:reduc|decreas|degrad|lower)\w* (?:the |our )?(?:throughput|performance))",
        ("slower", "slowdown", "slow-down", "no speed", "throughput", "performance"),
    ),
    # In prose; SGLang's own lines print the rate beside the length, which says more.
    Sign(
        "accept-rate-low",
        r"(?:[Aa]ccept(?:ance|ed)? (?:rate|ratio)|[Aa]ccept(?:ance)?_rate)\b(?!.{0,12}improv)[^\d\n]{1,40}"
        r"(?P<rate>0?\.[0-2]\d*|[012]?\d(?:\.\d+)? ?%)(?!\d)"
        r"|[Aa]ccept(?:ance|ed)?[ _](?:rate|ratio|length|len)\b (?:\w+ ){0,3}?(?:low|drop|degrad|poor|decreas|worse)"
        r"|\b(?:[Ll]ow(?:er)?|[Pp]oor|[Bb]ad|[Ss]mall|[Rr]educed|[Dd]egraded|[Aa]bnormal) [Aa]ccept(?:ance|ed)?[ _]"
        r"(?:token )?(?:[Rr]ate|[Ll]en(?:gth)?)\b"
        r"|\baccept(?:ance|ed) (?:token )?(?:length|rate)\b.{0,60}\b(?:gap|lower|below|worse|far from)\b"
        r"|\b(?:gap|lower|worse|less|far)\b.{0,60}\baccept(?:ance|ed) (?:token )?(?:length|rate)\b.{0,40}"
        r"\b(?:paper|reported|expected|official|published|claimed)",
        ("ccept",),
    ),
)

SIGNS: tuple[Sign, ...] = (*_SHAPES, *_CONTEXT, *_ACCEPTANCE)
