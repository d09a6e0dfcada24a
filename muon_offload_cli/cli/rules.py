"""``muon-offload rules``: every gate and why it is there."""

from __future__ import annotations

import typer


def rules() -> None:
    """List the rules that check-config and train apply, each with its reason."""
    from muon_offload_cli.config.rules import all_rules

    found = all_rules()
    width = max(len(rule.name) for rule in found)
    for rule in found:
        typer.echo(f"{rule.name:<{width}}  {rule.reason}{' (this machine)' if rule.machine else ''}")
