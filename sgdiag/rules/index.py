"""The index of the playbooks, made from the pages and the families of their findings."""

from __future__ import annotations

from collections.abc import Mapping

_OTHERS = "Others"


def index(pages: Mapping[str, str], families: Mapping[str, str]) -> str:
    """Markdown with a link to each of ``pages`` (text by finding id), grouped by ``families`` (family by finding id).

    Findings without a family come last.
    """
    groups: dict[str, list[str]] = {}
    for finding in sorted(pages):
        groups.setdefault(families.get(finding) or _OTHERS, []).append(finding)
    lines = ["# Playbooks", "", "One page for each finding, by family. This index is made by `make index`.", ""]
    for family in sorted(groups, key=lambda name: (name == _OTHERS, name)):
        lines += [f"## {family}", ""]
        lines += [f"- [`{finding}`]({finding}.md): {_title(pages[finding])}" for finding in groups[family]]
        lines.append("")
    return "\n".join(lines)


def _title(page: str) -> str:
    return page.partition("\n")[0].lstrip("# ").strip()
