"""``muon-offload check-config``: everything that is wrong with a run, before a GPU is busy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muon_offload_cli.cli.problems import exit_code, print_problems, problems_as_json
from muon_offload_cli.errors import Level, Problem

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="recipe=NAME | KEY=VALUE",
        help="A recipe by name or path, then overrides and parts: train.steps=5 data=mock.",
        show_default=False,
    ),
]
RecipeDirectories = Annotated[
    list[Path] | None,
    typer.Option(
        "--recipe-dir", metavar="FOLDER", help="A folder with recipes of your own.", show_default=False
    ),
]
Here = Annotated[
    bool, typer.Option("--here", help="Judge against this machine, whatever cluster the recipe names.")
]


def check_config(
    words: Words = None,
    recipe_dir: RecipeDirectories = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings refuse the run too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the problems as a JSON list.")] = False,
    here: Here = False,
) -> None:
    """Check a run without starting it: every problem at once, each with a fix.

    Exits with 0 (fine), 2 (the request is wrong) or 3 (it does not fit this machine).
    """
    from muon_offload_cli.cli.prepare import judge

    judged = judge(words or [], recipe_dir or [], here=here)
    config, problems = judged.config, judged.problems
    code = exit_code(problems, strict=strict)
    if json:
        typer.echo(problems_as_json(problems))
    else:
        print_problems(problems)
        if judged.facts.megatron is not None and judged.facts.megatron.version is not None:
            typer.echo(f"Megatron {judged.facts.megatron}")
        typer.echo(_verdict(config.recipe, problems, code))
    raise typer.Exit(code)


def _verdict(recipe: str, problems: list[Problem], code: int) -> str:
    counts = [
        f"{count} {level.value}{'s' * (count != 1)}"
        for level in Level
        if (count := sum(problem.level is level for problem in problems))
    ]
    return f"recipe {recipe}: {'fine' if code == 0 else 'refused'}{': ' * bool(counts)}{', '.join(counts)}"
