"""A recipe as a file: found by name or path, its parts and its own values checked key by key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muon_offload_cli.config.keys import FREE_PREFIX, is_known, misspelt_section, nearest
from muon_offload_cli.config.locations import RECIPE_SUFFIXES, find_recipes, from_home
from muon_offload_cli.config.overrides import check_key, example_recipe, normal_flag, short, unknown_option
from muon_offload_cli.errors import Problem, command, wrong

_SELF = "_self_"


def find_recipe(recipe: str, recipe_directories: Sequence[Path] = ()) -> Path:
    """Return the file of a recipe given by name or by path (anything with a slash or a YAML suffix).

    Raises:
        UserError: There is none; names the nearest ones.
    """
    if "/" in recipe or recipe.endswith(RECIPE_SUFFIXES):
        path = from_home(recipe)
        if not path.is_file():
            fault = "that is no file" if os.path.lexists(path) else "there is no such file"
            raise wrong(f"recipe={recipe}: {fault}.", "recipe=/path/to/file.yaml", "recipe")
        return path
    found = find_recipes(recipe_directories)
    if recipe in found:
        return found[recipe]
    near = nearest(recipe, found)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise wrong(
        f"recipe={short(recipe)}: there is no such recipe.{hint} "
        f"Recipes: {', '.join(sorted(found)) or 'none'}.",
        f"recipe={near[0] if near else example_recipe(found)}",
        "recipe",
    )


def checked_defaults(
    listed: Any, path: Path, options: Mapping[str, Mapping[str, Path]], problems: list[Problem]
) -> dict[str, str]:
    """Return option by group of a recipe's ``defaults`` list; adds what is wrong to `problems`."""
    fix = f"write 'defaults:' as a list of 'group: option'; groups: {', '.join(options)}"
    if not isinstance(listed, list):
        problems.append(Problem(what=f"'defaults' in {path} is no list.", fix=fix))
        return {}
    chosen: dict[str, str] = {}
    for entry in listed:
        if entry == _SELF:
            continue
        if not (isinstance(entry, dict) and len(entry) == 1):
            problems.append(
                Problem(what=f"{entry!r} below 'defaults' in {path} is no 'group: option'.", fix=fix)
            )
            continue
        ((group, option),) = entry.items()
        if group not in options:
            near = nearest(str(group), options, count=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            what = f"there is no group {group!r} (below 'defaults' in {path}).{hint}"
            problems.append(Problem(what=what, fix=fix, keys=(str(group),)))
        elif str(option) not in options[group]:
            problems.append(unknown_option(group, str(option), list(options[group]), str(path)))
        elif group in chosen:
            what = f"the group {group} is chosen twice below 'defaults' in {path}."
            problems.append(Problem(what=what, fix=f"keep one of {chosen[group]}, {option}", keys=(group,)))
        else:
            chosen[group] = str(option)
    return chosen


def values_of(
    body: Mapping[str, Any],
    path: Path,
    options: Mapping[str, Mapping[str, Path]],
    problems: list[Problem],
) -> dict[str, Any]:
    """Return value by key of what a recipe sets itself; adds what is wrong to `problems`."""
    values: dict[str, Any] = {}
    told: set[str] = set()
    for key, value in leaves(body):
        if (found := misspelt_section(key)) is not None:
            section, meant = found
            if section not in told:
                problems.append(_section(section, meant, path, body))
            told.add(section)
            if (problem := check_key(meant + key.removeprefix(section), options, str(path))) is not None:
                problems.append(problem)
        elif key == "recipe":
            what = f"{path} sets 'recipe', which is the name of the file."
            problems.append(Problem(what=what, fix="take that line out", keys=(key,)))
        elif (problem := check_key(key, options, str(path))) is not None:
            problems.append(problem)
        else:
            values[key] = value
    return values


def _section(section: str, meant: str, path: Path, body: Mapping[str, Any]) -> Problem:
    what = f"there is no section {short(section)!r} in {path}: {meant} is meant."
    old, new = section.rpartition(".")[2], meant.rpartition(".")[2]
    fix = f"write {new} in the place of {old}"
    if meant in body:
        fix = f"move what stands below {old} to {new}"
    elif re.fullmatch(r"\w+", section, re.ASCII) and f"\n{section}:" in f"\n{path.read_text('utf-8')}":
        # Elsewhere than at the start of a line the word may stand for something else.
        fix = command("sed", "-i", f"s/^{section}:/{new}:/", path)
    return Problem(what=what, fix=fix, keys=(section, meant))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values, where the schema has a value and not a section."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key.startswith(FREE_PREFIX):
            key = FREE_PREFIX + normal_flag(key.removeprefix(FREE_PREFIX))
        if isinstance(value, dict) and not is_known(key):
            yield from leaves(value, f"{key}.")
        elif value is not None or is_known(key):
            yield key, value
        # An empty section ("offload:" with nothing below it) sets nothing.
