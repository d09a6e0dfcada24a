"""Telling problems: as text a person reads, as JSON a program reads, as an exit code."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from muon_offload_cli.errors import Level, Problem, command, visible

_COLOURS = {Level.ERROR: "bold red", Level.WARNING: "bold yellow", Level.NOTE: "bold blue"}


def print_problems(problems: Sequence[Problem]) -> None:
    """Print each problem on standard error: what on one line, the fix on the next."""
    # Drawing costs a tenth of a second to import, which --help must not pay.
    from rich.console import Console
    from rich.text import Text

    # Rich would otherwise cut piped lines at 80 columns, and a fix is there to be pasted.
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    for problem in problems:
        console.print(
            Text.assemble((f"{problem.level.value}:", _COLOURS[problem.level]), f" {visible(problem.what)}")
        )
        if problem.fix:
            console.print(Text.assemble(("  fix:", "bold"), f" {visible(problem.fix)}"))


def problems_as_json(problems: Sequence[Problem]) -> str:
    """Return the problems as a JSON list of ``{rule, level, keys, what, fix}``."""
    return json.dumps(
        [
            {
                "rule": problem.rule,
                "level": problem.level.value,
                "keys": list(problem.keys),
                "what": problem.what,
                "fix": problem.fix,
            }
            for problem in problems
        ],
        indent=1,
    )


def exit_code(problems: Sequence[Problem], *, strict: bool = False) -> int:
    """Return what the command exits with: the worst error's code, 2 for warnings if `strict`, else 0."""
    codes = [problem.exit_code for problem in problems if problem.level is Level.ERROR]
    if strict and any(problem.level is Level.WARNING for problem in problems):
        codes.append(2)
    return max(codes, default=0)


def another_place(option: str, path: Path) -> str:
    """Return the fix for an output file whose folder does not take it: make the folder, or another one."""
    if not path.parent.exists():
        return command("mkdir", "-p", path.parent)
    return command(option, Path(tempfile.gettempdir()) / path.name)
