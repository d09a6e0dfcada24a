"""``muon-offload rules``: every gate and why it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muon_offload_cli.config.rules import Rule

_HEAD = """# Rules

What `muon-offload check-config` and `muon-offload train` refuse, warn of or note, and why. This page is what
`muon-offload rules --markdown` prints (`make docs` writes it).

A rule of the machine judges what only the machine at hand can tell. For a recipe whose cluster is not
`local`, its findings are notes; `--here` and `train` count them in full.
"""


def rules(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/rules.md.")] = False,
) -> None:
    """List the rules that check-config and train apply, each with its reason."""
    from muon_offload_cli.config.rules import all_rules

    found = all_rules()
    if markdown:
        typer.echo(as_markdown(), nl=False)
        return
    width = max(len(rule.name) for rule in found)
    for rule in found:
        typer.echo(f"{rule.name:<{width}}  {rule.reason}{' (this machine)' if rule.machine else ''}")


def as_markdown() -> str:
    """Return the documentation of all rules: what each does is its function's docstring."""
    from muon_offload_cli.config.rules import rules_by_subject

    parts = [_HEAD]
    for title, found in rules_by_subject().items():
        parts += [f"\n## {title.rstrip('.')}\n\n", _table(found)]
    return "".join(parts)


def _table(found: Sequence[Rule]) -> str:
    lines = ["| rule | what it does | why |", "|---|---|---|"]
    for rule in found:
        does = f"{rule.summary}{' (machine)' if rule.machine else ''}"
        lines.append(f"| `{rule.name}` | {_cell(does)} | {_cell(rule.reason)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
