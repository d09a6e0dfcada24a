"""``muon-offload recipes``: what can be trained out of the box, what it is made of, and a copy to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muon_offload_cli.cli.check_config import RecipeDirectories


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this one: its plan, its sources and every value.", show_default=False),
    ] = None,
    recipe_dir: RecipeDirectories = None,
    copy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the recipe to FILE, for editing.", show_default=False),
    ] = None,
) -> None:
    """List recipes, one line each; show or copy one."""
    from muon_offload_cli.errors import command, wrong

    if name is not None:
        _one(name.removeprefix("recipe="), recipe_dir or [], copy)
    elif copy is not None:
        raise wrong(
            f"--copy {copy} needs the name of a recipe.",
            command("muon-offload", "recipes", "tiny", "--copy", copy),
        )
    else:
        _all(recipe_dir or [])


def _all(recipe_directories: list[Path]) -> None:
    from muon_offload_cli.config.locations import find_recipes
    from muon_offload_cli.config.yaml_files import read_mapping
    from muon_offload_cli.errors import UserError

    found = find_recipes(recipe_directories)
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


def _one(name: str, recipe_directories: list[Path], copy: Path | None) -> None:
    from muon_offload_cli.cli.disk_plan_view import in_three_lines
    from muon_offload_cli.cli.planning import plan_of, settle_host_memory
    from muon_offload_cli.config.compose import compose
    from muon_offload_cli.config.recipe_file import find_recipe
    from muon_offload_cli.config.sources import sources_of
    from muon_offload_cli.config.yaml_files import to_yaml

    path = find_recipe(name, recipe_directories)
    composition = compose(str(path))
    if copy is not None:
        _copy(path, copy)
        return
    config = composition.config
    typer.echo(f"{path.stem}: {' '.join(config.description.split())}\n")
    values = to_yaml(config).rstrip()
    settle_host_memory(config, composition.written, here=config.cluster.name == "local")
    plan = plan_of(config, composition.written)
    if plan is None:
        typer.echo(f"no plan: muon-offload check-config recipe={name} says why")
    else:
        for label, text in in_three_lines(plan):
            typer.echo(f"{label:<13}  {text}")
    typer.echo()
    for source in sources_of(path):
        typer.echo(f"{source.role}  ({source.path})")
        for note in source.notes:
            typer.echo(f"  {note}")
    typer.echo("\n" + values)


def _copy(source: Path, target: Path) -> None:
    from muon_offload_cli.cli.problems import another_place
    from muon_offload_cli.errors import command, wrong

    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise wrong(f"--copy {target}: it exists already.", "give a new file") from error
    except OSError as error:
        raise wrong(
            f"--copy {target} cannot be written: {error.strerror}.", another_place("--copy", target)
        ) from error
    typer.echo(command("muon-offload", "train", f"recipe={'' if target.is_absolute() else './'}{target}"))
