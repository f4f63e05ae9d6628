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
        ("The size of tensor a",),
    ),
    Sign(
        "expanded-sizes-differ",
        r"The expanded size of the tensor \((?P<a>\d+)\) must match the existing size \((?P<b>\d+)\)"
        r"(?: at non-singleton dimension (?P<dimension>\d+))?",
        ("The expanded size of the tensor",),
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
        ("is invalid for input of size", "shape mismatch: value tensor"),
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
        (
            "cat() received an invalid",
            "expected Tensor as element",
            "'NoneType' object has no attribute",
            "variable 'aux_",
        ),
    ),
    Sign(
        "target-without-drafts",
        r"'(?P<model>\w+)' object has no attribute '(?P<method>set_(?:eagle3|dflash)_layers_to_capture"
        r"|get_embed_and_head|set_embed_and_head|set_embed)'",
        ("_layers_to_capture'", "embed_and_head'", "'set_embed'"),
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
        r"|(?:vectorized_gather_kernel|indexSelect\w*|gather_kernel).{0,200}Assertion",
        ("index out of bounds", "is out of bounds for dimension", "indexSelect", "gather_kernel"),
    ),
)

_CONTEXT = (
    Sign(
        "speculative-frame",
        r"speculative/\w{1,60}\.py|(?:eagle|nextn|_mtp|ngram_info|ngram_worker|dflash|dspark)\w{0,60}\.py"
        r"|draft_extend|forward_batch_speculative_generation",
        (
            "speculative/",
            "eagle",
            "nextn.py",
            "_mtp.py",
            "ngram_",
            "dflash",
            "dspark",
            "draft_extend",
            "speculative_generation",
        ),
    ),
    Sign("slots-allocated", r"\balloc_(?:paged_)?token_slots", ("token_slots",)),
    Sign("layers-unpacked", r"\baux_hidden_states\s*=", ("aux_hidden_states",)),
    Sign(
        "draft-loaded",
        r"Load weight end\..*\btype=(?P<model>\w*(?:Eagle|EAGLE|NextN|MTP|DFlash|DSpark|Draft)\w*)",
        ("Load weight end",),
    ),
    Sign("speculative-flag", r"--speculative-(?P<flag>[a-z-]+)(?:[ =](?P<value>\S+))?", ("--speculative-",)),
)

_ACCEPTANCE = (
    # Whole logs have the figure on their decode lines, which the log's facts tell; this is for what others print of it.
    Sign(
        "accept-length-low",
        r"[Aa]ccept(?:ance)?[ _-]?len(?:gth)?\s*[:=]\s*(?P<length>1(?:\.[0-5]\d*)?)(?![\d.])",
        ("ccept len", "ccept_len", "cceptance len", "cceptance_len", "ccept-len"),
    ),
)

SIGNS: tuple[Sign, ...] = (*_SHAPES, *_CONTEXT, *_ACCEPTANCE)
