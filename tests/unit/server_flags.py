"""The flags that a release's server takes, read with ``ast`` from SGLang's sources: nothing of them is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def flags(sglang: Path) -> set[str]:
    """All flags, aliases and deprecated ones among them, of the release in that ``sglang`` folder."""
    srt = sglang / "srt"
    modules = [srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")]
    found: set[str] = set()
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                if not any(word.arg == "error_message" for word in node.keywords):
                    found.update(_strings(*node.args))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.update(_of_field(node.target.id, node.annotation))
    return {flag for flag in found if flag.startswith("--")}


def _of_field(name: str, annotation: ast.expr) -> Iterator[str]:
    """Those of a field ``name: A[type, "help"]`` or ``A[type, Arg(…)]``."""
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) not in ("A", "Annotated"):
        return
    parts = annotation.slice.elts[1:] if isinstance(annotation.slice, ast.Tuple) else []
    words = {
        word.arg: word.value
        for part in parts
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "Arg"
        for word in part.keywords
    }
    helped = bool(words) or any(isinstance(part, (ast.Constant, ast.JoinedStr, ast.BinOp)) for part in parts)
    if not helped or ("no_cli" in words and ast.unparse(words["no_cli"]) == "True"):
        return
    yield from _strings(words["cli_name"]) if "cli_name" in words else ("--" + name.replace("_", "-"),)
    if "aliases" in words:
        yield from _strings(words["aliases"])


def _strings(*nodes: ast.expr) -> Iterator[str]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
