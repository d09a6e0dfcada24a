"""Where a recipe's values come from: its file, the parts it combines, and what their authors noted on top."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.config.locations import group_options
from muon_offload_cli.config.yaml_files import read_mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file that a recipe is made of.

    Attributes:
        role: ``recipe``, or the part's group and option: ``model: qwen3_4b``.
        path: The file.
        notes: The comment on top of it, a paragraph a line; where its numbers are from, what was run.
    """

    role: str
    path: Path
    notes: tuple[str, ...]


def sources_of(path: Path) -> list[Source]:
    """Return the recipe's own file, then its parts in the order that it names them.

    Args:
        path: A recipe that composes.
    """
    listed = read_mapping(path, "recipe").get("defaults", [])
    chosen = [pair for entry in listed if isinstance(entry, dict) for pair in entry.items()]
    options = group_options()
    found = [Source(role="recipe", path=path, notes=notes_of(path))]
    for group, option in chosen:
        part = options[group][str(option)]
        found.append(Source(role=f"{group}: {option}", path=part, notes=notes_of(part)))
    return found


def notes_of(path: Path) -> tuple[str, ...]:
    """Return the comment that a YAML file begins with, each paragraph joined to one line."""
    paragraphs = [""]
    for text in _comment_lines(path):
        if text:
            paragraphs[-1] = f"{paragraphs[-1]} {text}".strip()
        else:
            paragraphs.append("")
    return tuple(filter(None, paragraphs))


def _comment_lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.lstrip("#").strip()
