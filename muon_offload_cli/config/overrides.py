"""Sorting the words of a command line: the recipe, the parts chosen, the values given.

Hydra's grammar parses each word, but its additions (``+key``, ``~key``, sweeps, ``hydra.*``) change
nothing that a run could use or are dropped in silence by the compose API, so they are refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muon_offload_cli.config.keys import (
    FREE_PREFIX,
    ONE_OR_SEVERAL,
    example_of,
    is_known,
    is_text,
    leaf_types,
    misspelt_section,
    nearest,
    nearest_key,
    section_names,
)
from muon_offload_cli.config.locations import RECIPE_SUFFIXES
from muon_offload_cli.errors import Problem, command, override, shell_word, visible, wrong

MAX_WORD = 16384


@dataclass(kw_only=True, slots=True)
class Overrides:
    """What a command line asks for.

    Attributes:
        parts: Option by group, ``{"data": "text"}``.
        values: Value by dotted key; Megatron flags below ``megatron.args`` with underscores.
        problems: What cannot be meant.
    """

    parts: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def split_recipe(words: Sequence[str], known: Iterable[str] = ()) -> tuple[str, list[str]]:
    """Separate ``recipe=NAME`` from the other words of a command line.

    Args:
        words: Everything after the command.
        known: Names to list if there is no recipe.

    Raises:
        UserError: No recipe, an empty one, or more than one.
    """
    recipes = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
    if len(recipes) == 1 and recipes[0]:
        return recipes[0], [word for word in words if not word.startswith("recipe=")]
    if len(recipes) > 1:
        raise wrong(f"recipe is given {len(recipes)} times: {', '.join(recipes)}.", "give it once", "recipe")
    names = sorted(known)
    for word in words:
        if word in names or ("=" not in word and word.endswith(RECIPE_SUFFIXES)):
            fix = command(f"recipe={word}")
            raise wrong(f"no recipe is given: {short(word)} is one, without 'recipe='.", fix, "recipe")
    listed = f" Recipes: {', '.join(names)}." if names else ""
    raise wrong(f"no recipe is given.{listed}", f"recipe={example_recipe(names)}", "recipe")


def example_recipe(known: Iterable[str]) -> str:
    """Return the recipe to name where any would do: the one that runs everywhere."""
    names = sorted(known)
    return "tiny" if "tiny" in names else names[0] if names else "NAME"


def sort_overrides(words: Sequence[str], options: Mapping[str, Iterable[str]]) -> Overrides:
    """Parse overrides and check that their keys and parts exist; a later word wins over an earlier one.

    Args:
        words: ``key=value`` or ``group=option``, without ``recipe=``.
        options: Option names by group.
    """
    # Loading the grammar costs a tenth of a second, which --help must not pay.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    result = Overrides()
    misspelt: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for word in map(spelled_out, words):
        problem = _refused_form(word, options)
        if problem is not None:
            result.problems.append(problem)
            continue
        key, _, text = word.partition("=")
        key = _normalised(key)
        if (problem := check_key(key, options)) is not None:
            found = misspelt_section(key)
            if found is not None and is_known(renamed := found[1] + key.removeprefix(found[0])):
                misspelt.setdefault(found, []).append((key, shell_word(f"{renamed}={text}")))
            else:
                result.problems.append(problem)
            continue
        try:
            # The key was checked above; the grammar is asked for the value alone, under a key it accepts.
            parsed = parser.parse_override(f"value={text}")
            value = None if parsed.is_sweep_override() else _without_quotes(parsed.value())
        except (HydraException, ValueError, RecursionError) as error:
            result.problems.append(_malformed(key, text, str(error)))
            continue
        if parsed.is_sweep_override():
            what = f"{key}={short(text)} gives several values (a sweep), and a run takes one."
            fix = shell_word(f"{key}=[{text}]") if is_list(key) else f"give one value to {key}"
            result.problems.append(Problem(what=what, fix=fix, keys=(key,)))
        elif key in options:
            _add_part(result, key, value, list(options[key]))
        else:
            # A text such as 1_0 or true is meant as it is written, and not as the number that it could be.
            written = is_text(key) and isinstance(value, int | float)
            result.values[key] = text.strip() if written else value
    for (section, meant), words_of_it in misspelt.items():
        keys, fixed = zip(*words_of_it, strict=True)
        what = f"there is no section {short(section)!r} ({', '.join(map(short, keys))}): {meant} is meant."
        result.problems.append(Problem(what=what, fix=" ".join(fixed), keys=(*keys, meant)))
    return result


def spelled_out(word: str) -> str:
    """Write ``resume=X`` as ``resume.source=X``: `resume` is also a section."""
    return f"resume.source={word.removeprefix('resume=')}" if word.startswith("resume=") else word


def check_key(key: str, options: Mapping[str, Iterable[str]], where: str = "") -> Problem | None:
    """Return what is wrong with a dotted key, None if it holds a value or names a group.

    Args:
        key: Dotted key.
        options: Option names by group.
        where: Where it was written, for the message; empty for the command line.
    """
    place = f" in {where}" if where else ""
    if is_known(key) or (key in options and not where):
        return None
    if key in section_names():
        inside = [name for name in leaf_types() if name.startswith(key + ".")]
        listed = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
        return Problem(
            what=f"{short(key)}{place} is a section, not a key that takes a value.",
            fix=f"name a key in it: {listed}" if inside else f"{FREE_PREFIX}FLAG=value",
            keys=(key,),
        )
    near = nearest_key(key)
    if near is None and (groups := nearest(key, options, count=1)) and not where:
        near = groups[0]
    return Problem(
        what=f"there is no key {short(key)!r}{place}." + (f" Did you mean {near}?" if near else ""),
        fix=(f"write {near} in its place" if where else f"{near}=...")
        if near
        else f"keys start with {', '.join(sorted(options))}, train, checkpoint, ...",
        keys=(key,),
    )


def unknown_option(group: str, option: str, known: Sequence[str], where: str = "") -> Problem:
    """Return the problem of a part that does not exist, with the nearest ones."""
    near = nearest(option, known)
    place = f" in {where}" if where else ""
    return Problem(
        what=f"{group}={short(option)}{place}: there is no such part."
        + (f" Did you mean {near[0]}?" if near else "")
        + f" There are: {', '.join(known)}.",
        fix=f"{group}={near[0] if near else known[0]}",
        keys=(group,),
    )


def _add_part(result: Overrides, group: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        what = f"{group} takes the name of a part, one of {', '.join(known)}."
        result.problems.append(Problem(what=what, fix=f"{group}={known[0]}", keys=(group,)))
    elif str(value) not in known:
        result.problems.append(unknown_option(group, str(value), known))
    else:
        result.parts[group] = str(value)


def _refused_form(word: str, options: Mapping[str, Iterable[str]]) -> Problem | None:
    key = word.partition("=")[0]
    bare = key.lstrip("+~")
    if len(word) > MAX_WORD:
        what = f"an override of {len(word)} characters, starting {short(word)}, is too long."
        return Problem(what=what, fix="put long values into a recipe file", keys=())
    if key.startswith(("+", "~")):
        added = key.startswith("+")
        refused = "be added; every key that exists is known already" if added else "be deleted"
        unknown = check_key(_normalised(bare), options)
        told = "" if unknown is None else f" And {unknown.what}"
        return Problem(
            what=f"{short(word)}: keys cannot {refused}.{told}",
            fix=unknown.fix
            if unknown
            else shell_word(word.lstrip("+"))
            if added
            else _instead(bare, options),
            keys=(bare,),
        )
    if bare == "hydra" or bare.startswith(("hydra.", "hydra/")):
        what = f"{short(word)}: Hydra's own settings have no effect here."
        return Problem(
            what=what, fix="leave it out; run.directory=/path chooses the run folder", keys=(bare,)
        )
    if bare == "recipe":
        return Problem(what="recipe is given twice.", fix="give it once", keys=("recipe",))
    if "=" not in word:
        known = is_known(word)
        what = f"{short(word)!r} is no key=value."
        return Problem(what=what, fix=f"{word}=VALUE" if known else "write key=value, as in train.steps=30")
    if not bare:
        return Problem(what=f"{short(word)}: there is no key before the '='.", fix="write key=value")
    return None


def _instead(key: str, options: Mapping[str, Iterable[str]]) -> str:
    """Return the word that sets what was to be deleted."""
    if key in options:
        return f"{key}={next(iter(options[key]))}"
    return f"{key}={'null' if key.startswith(FREE_PREFIX) else example_of(key)}"


def _malformed(key: str, text: str, message: str) -> Problem:
    # The parser's own words name tokens of its grammar; what a person can use of them is the place.
    stray = re.search(r"(?:input|error at:) '(.+?)'", message)
    reason = f" at {short(stray[1])}" if stray and stray[1] != "<EOF>" else ""
    return Problem(what=f"{key}={short(text)} is malformed{reason}.", fix=_quoted(key, text), keys=(key,))


def _quoted(key: str, text: str) -> str:
    """Return the override with its value in quotes, which take any characters, ready for a shell."""
    if text.startswith("="):
        return override(key, text.lstrip("="))
    if not is_text(key) or len(text) > 500:
        return "write key=value"
    listed = is_list(key) and (key not in ONE_OR_SEVERAL or text.startswith("["))
    if not listed:
        return override(key, text.strip())
    items = text.removeprefix("[").removesuffix("]").split(",")
    return override(key, [item.strip() for item in items if item.strip()])


def _normalised(key: str) -> str:
    if not key.startswith(FREE_PREFIX):
        return key
    return FREE_PREFIX + normal_flag(key.removeprefix(FREE_PREFIX))


def normal_flag(flag: str) -> str:
    """Write a Megatron flag as its parser's attribute: no leading dashes, underscores inside."""
    return flag.lstrip("-").replace("-", "_")


def is_list(key: str) -> bool:
    """Tell whether `key` holds a list."""
    return "list" in str(leaf_types().get(key, ""))


def _without_quotes(value: Any) -> Any:
    """Turn Hydra's quoted strings, also inside lists and mappings, into plain ones."""
    text = getattr(value, "text", None)
    if isinstance(text, str):
        return text
    if isinstance(value, list):
        return [_without_quotes(item) for item in value]
    if isinstance(value, dict):
        return {str(_without_quotes(key)): _without_quotes(item) for key, item in value.items()}
    return value


def short(text: str, limit: int = 120) -> str:
    """Cut very long texts and make control characters visible, so that a message stays one line."""
    return visible(text[:limit]) + ("..." if len(text) > limit else "")
