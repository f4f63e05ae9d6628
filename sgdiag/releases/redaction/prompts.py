"""What users ask a server and what it answers, where SGLang prints that: request logs, grammars, output parsers."""

from __future__ import annotations

import re
from collections.abc import Callable

Hide = Callable[[str], str]
"""Gives the stand-in for a text."""

# The bounds keep a hostile line from being walked many times; a value may be cut at the end of the line.
_QUOTED = r"""(?:'(?:[^'\\]|\\.){0,65536}(?:'|\Z)|"(?:[^"\\]|\\.){0,65536}(?:"|\Z))"""
_NUMBERS = r"\[[-+\d.,eE\s\[\]]{4,65536}(?:\Z|(?<=\]))"
_TEXTS = rf"\[\s{{0,3}}{_QUOTED}(?:\s{{0,3}},\s{{0,3}}{_QUOTED}){{0,4096}}\s{{0,3}}(?:\]|\Z)"

_REQUEST = re.compile(r"""\b(?:Receive|Finish)(?: OpenAI)?: obj=|["']event["']\s?:\s?["']request\.""")
"""How the request log begins a line, as text and as JSON."""

_REQUEST_VALUE = re.compile(rf"({_QUOTED})(\s{{0,3}}:)?|{_NUMBERS}")

_KEPT_VALUE = re.compile(
    r"""["'](?:request\.[\w.]{1,40}|[0-9a-f]{32}|(?:stop|length|abort|default|auto|text|assistant|user|system|tool)|"""
    r"""\d{4}-\d\d-\d\dT[\d:.+Z-]{1,30})["']"""
)
"""Values in a request line that say nothing of what was asked: its id, times, why it finished."""

_NAMED = re.compile(
    r"""(?<![\w])((?:text|prompts?|messages|content|reasoning_content|input_text|origin_input_text|output_text|"""
    r"""(?:origin_)?input_ids|output_ids|decoded|decoded_text|input_embeds|image_data|audio_data|video_data|"""
    r"""key_string|regex|ebnf|input|input_value|json_schema|arguments|instructions|query|documents|suffix|body)["']?\s{0,3}[=:]\s{0,3})"""
    rf"(?:{_QUOTED}|{_NUMBERS}|{_TEXTS})"
)

_REST = re.compile(
    r"((?:detect_and_parse|parse_streaming_increment|Could not extract tool call from|JSON decode error"
    r"|Unparsed required tool call output|tool call returned as content|emitted invalid JSON arguments"
    r"|skip invalid regex|Got unhandled regex token|Failed to parse (?:JSON |tool call )?(?:part|arguments?)"
    r"|Tool call parsing error|Reasoning parsing error)\s?:\s{0,3})(?!<text, \d{1,9} characters>\Z)(\S.*)",
    re.DOTALL,
)
"""Words after which a line of SGLang's goes on with output of the model."""

_LONG_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.){24,65536}'|"(?:[^"\\]|\\.){24,65536}")(?!\w)""")
_WORD = re.compile(r"(?<!\S)['\"(]?[A-Za-z]{2,}[.,;:!?)'\"]{0,2}(?!\S)|[^\W\x00-\x7f]")
_WORDS_OF_PROSE, _LEAST_PROSE = 8, 60
"""A quotation of so many words, or letters beyond English, is somebody's text: SGLang quotes names and paths."""

_AFTER_FAILURE = re.compile(r"(?:failure|error)(?: \d{1,6})?:? ?\Z", re.IGNORECASE)

_ACCESS = re.compile(r'(?<=")([A-Z]{3,7} /[^\s?"]*)\?(?!<text, )[^\s"]+')
"""A request line of the access log with its query, which may hold anything."""

_WORTH_A_LOOK = re.compile(r"""['"\[]|parse|tool call|regex token""")


def hide_prompts(text: str, hide: Hide) -> str:
    """``text`` with what users wrote or the model answered replaced by ``hide`` of it."""
    if not _WORTH_A_LOOK.search(text):
        return text
    if (request := _REQUEST.search(text)) is not None:
        start = request.start()
        return text[:start] + _REQUEST_VALUE.sub(lambda found: _request_value(found, hide), text[start:])
    text = _REST.sub(lambda found: found[1] + hide(found[2]), text)
    text = _ACCESS.sub(lambda found: f"{found[1]}?{hide(found[0][len(found[1]) + 1 :])}", text)
    text = _NAMED.sub(lambda found: found[1] + _hidden(found[0][len(found[1]) :], hide), text)
    return _LONG_QUOTED.sub(lambda found: hide(found[0]) if _is_prose(found) else found[0], text)


def _is_prose(found: re.Match[str]) -> bool:
    """A quotation that somebody wrote; what CUDA and NCCL say of a failure is quoted, too."""
    if _AFTER_FAILURE.search(found.string, max(found.start() - 24, 0), found.start()):
        return False
    long_enough = len(found[0]) >= _LEAST_PROSE or not found[0].isascii()
    return long_enough and len(_WORD.findall(found[0])) >= _WORDS_OF_PROSE


def _request_value(found: re.Match[str], hide: Hide) -> str:
    """A value of a request line; its keys stay."""
    return found[0] if found[2] is not None or _KEPT_VALUE.fullmatch(found[0]) else _hidden(found[0], hide)


def _hidden(value: str, hide: Hide) -> str:
    return hide(value) if len(value) > len("''") else value
