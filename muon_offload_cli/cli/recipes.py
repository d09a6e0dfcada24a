"""``muon-offload recipes``: what can be trained out of the box."""

from __future__ import annotations

import typer

from muon_offload_cli.cli.check_config import RecipeDirectories


def recipes(recipe_dir: RecipeDirectories = None) -> None:
    """List recipes, one line each."""
    from muon_offload_cli.config.locations import find_recipes
    from muon_offload_cli.config.yaml_files import read_mapping
    from muon_offload_cli.errors import UserError

    found = find_recipes(recipe_dir or [])
    width = max(map(len, found), default=0)
    problems = []
    for name in sorted(found):
        try:
            description = str(read_mapping(found[name], "recipe").get("description") or "")
        except UserError as error:
            problems += error.problems
            continue
        typer.echo(f"{name:<{width}}  {' '.join(description.split())}".rstrip())
    if problems:
        raise UserError(problems=problems)
