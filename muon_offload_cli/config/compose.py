"""Composing a run: parts below ``conf/``, a recipe, then the user's overrides, into the schema.

Hydra resolves the recipe's list of parts. Everything that a person can get wrong is looked at before
and after it, key by key, because Hydra stops at the first error and answers a misspelled key with the
advice to append it. Precedence, lowest first: schema, Hugging Face model, parts, recipe, overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muon_offload_cli.config.from_hf import HfModel, read_model
from muon_offload_cli.config.hf_file import KEY as HF_KEY
from muon_offload_cli.config.keys import (
    FREE_PREFIX,
    ONE_OR_SEVERAL,
    describe_type,
    enum_members,
    example_of,
    is_known,
    leaf_types,
    nearest,
)
from muon_offload_cli.config.locations import RECIPE_SUFFIXES, find_recipes, group_options, shipped_directory
from muon_offload_cli.config.overrides import (
    Overrides,
    check_key,
    example_recipe,
    is_list,
    normal_flag,
    sort_overrides,
    unknown_option,
)
from muon_offload_cli.config.rules import MachineFacts, check, refuses
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.yaml_files import read_mapping
from muon_offload_cli.errors import Problem, UserError, override, wrong

_SELF = "_self_"
_PRIMARY = "muon_offload_recipe"
# Keys that decide which others of their section are read at all.
_CHOICES = frozenset(
    {
        "offload.engine",
        "optimizer.name",
        "data.source",
        "model.moe.num_experts",
        "launcher.nodes",
        "checkpoint.directory",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A resolved configuration and who wrote what.

    Attributes:
        config: The whole run.
        written: Keys that the recipe file or the command line sets itself, not a part or a default. A
            recipe's keys of a section whose choice the command line replaces are not among them.
    """

    config: Config
    written: frozenset[str]


def compose(
    recipe: str, overrides: Sequence[str] = (), recipe_directories: Sequence[Path] = ()
) -> Composition:
    """Compose a run.

    Args:
        recipe: Name of a recipe, or path of a recipe file.
        overrides: ``key=value`` and ``group=option`` words; later ones win.
        recipe_directories: Folders of the user's own recipes, searched before the shipped ones.

    Raises:
        UserError: With every problem that was found: unknown recipe, part or key, malformed file or
            override, wrong type, missing value; then also what the rules refuse of the rest.
    """
    options = group_options()
    path = find_recipe(recipe, recipe_directories)
    body = read_mapping(path, "recipe")
    asked = sort_overrides(overrides, options)
    problems: list[Problem] = []
    defaults = _checked_defaults(body.pop("defaults", []), path, options, problems)
    recipe_values = _recipe_values(body, path, options, problems)
    if problems:
        # Without its parts a recipe lacks values, and saying so of each would hide the cause.
        raise UserError(problems=[*asked.problems, *problems])
    problems = asked.problems

    parts = dict(_leaves(_compose_parts({**defaults, **asked.parts})))
    problems += _hidden_parts(asked, options, parts, recipe_values, path)
    values: dict[str, Any] = {**parts, **recipe_values, "recipe": path.stem}
    given = values.keys() | asked.values.keys()
    pretrained = _pretrained({**values, **asked.values}, problems)
    if pretrained is not None:
        values = {**pretrained.values(), **values}
    config = _typed(values, asked.values, path, problems)
    written = _written(asked, recipe_values)
    if config is not None and pretrained is not None:
        config.model.from_hf = str(pretrained.folder)
        problems += pretrained.contradictions(config, given)
    if config is None or problems:
        raise UserError(problems=[*problems, *_also_wrong(config, written, problems)])
    return Composition(config=config, written=written)


def _pretrained(values: Mapping[str, Any], problems: list[Problem]) -> HfModel | None:
    """Return the Hugging Face model that a run is given, None if there is none or it cannot be read."""
    given = values.get(HF_KEY)
    # YAML reads a folder called 7 as a number; what no text can be made of is told as a wrong type.
    if not isinstance(given, str | int | float) or given == MISSING:
        return None
    try:
        return read_model(str(given))
    except UserError as error:
        problems += error.problems
        return None


def _also_wrong(config: Config | None, written: frozenset[str], told: Sequence[Problem]) -> list[Problem]:
    """Return what the rules refuse of the rest, so that one look shows everything.

    What a refused word was meant to change is left out: it would be judged by the value that it replaces.
    """
    if config is None:
        return []
    # A group's name stands for all of its keys.
    unclear = {key for problem in told for key in problem.keys}
    found = refuses(check(config, written, MachineFacts(), here=False))
    return [
        problem
        for problem in found
        if not any(key in unclear or key.partition(".")[0] in unclear for key in problem.keys)
    ]


def _written(asked: Overrides, recipe_values: Mapping[str, Any]) -> frozenset[str]:
    """Return what counts as written: a recipe's chunk size says nothing after ``offload=none``."""
    replaced = set(asked.parts) | {key.partition(".")[0] for key in _CHOICES & asked.values.keys()}
    kept = {key for key in recipe_values if key.partition(".")[0] not in replaced}
    return frozenset(kept) | frozenset(asked.values)


def find_recipe(recipe: str, recipe_directories: Sequence[Path] = ()) -> Path:
    """Return the file of a recipe given by name or by path (anything with a slash or a YAML suffix).

    Raises:
        UserError: There is none; names the nearest ones.
    """
    if "/" in recipe or recipe.endswith(RECIPE_SUFFIXES):
        path = Path(recipe).expanduser()
        if not path.is_file():
            raise wrong(f"recipe={recipe}: there is no such file.", "recipe=/path/to/file.yaml", "recipe")
        return path
    found = find_recipes(recipe_directories)
    if recipe in found:
        return found[recipe]
    near = nearest(recipe, found)
    hint = f" Did you mean {near[0]}?" if near else ""
    shown = recipe if len(recipe) <= 120 else recipe[:120] + "..."
    raise wrong(
        f"recipe={shown}: there is no such recipe.{hint} Recipes: {', '.join(sorted(found)) or 'none'}.",
        f"recipe={near[0] if near else example_recipe(found)}",
        "recipe",
    )


def _checked_defaults(
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


def _recipe_values(
    body: Mapping[str, Any],
    path: Path,
    options: Mapping[str, Mapping[str, Path]],
    problems: list[Problem],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in _leaves(body):
        if key == "recipe":
            what = f"{path} sets 'recipe', which is the name of the file."
            problems.append(Problem(what=what, fix="take that line out", keys=(key,)))
        elif (problem := check_key(key, options, str(path))) is not None:
            problems.append(problem)
        else:
            values[key] = value
    return values


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values, where the schema has a value and not a section."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key.startswith(FREE_PREFIX):
            key = FREE_PREFIX + normal_flag(key.removeprefix(FREE_PREFIX))
        if isinstance(value, dict) and not is_known(key):
            yield from _leaves(value, f"{key}.")
        elif value is not None or is_known(key):
            yield key, value
        # An empty section ("offload:" with nothing below it) sets nothing.


def _compose_parts(chosen: Mapping[str, str]) -> dict[str, Any]:
    """Let Hydra put the chosen parts together."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    store = ConfigStore.instance()
    store.store(name=_PRIMARY, node={"defaults": [{group: option} for group, option in chosen.items()]})
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(shipped_directory("conf"))):
            composed = hydra_compose(config_name=_PRIMARY)
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().splitlines()[0]
        raise wrong(f"the parts below {shipped_directory('conf')} do not compose: {first}.") from error
    plain = OmegaConf.to_container(composed, resolve=False)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def _hidden_parts(
    asked: Overrides,
    options: Mapping[str, Mapping[str, Path]],
    parts: Mapping[str, Any],
    recipe_values: Mapping[str, Any],
    path: Path,
) -> Iterator[Problem]:
    """Yield parts chosen on the command line whose values the recipe file overrides.

    A recipe wins over its parts; dropping what was just asked for without a word would be worse
    than asking again.
    """
    for group, option in asked.parts.items():
        for key in dict(_leaves({group: read_mapping(options[group][option], "part")})):
            wanted = parts.get(key)
            if key in asked.values or recipe_values.get(key, wanted) == wanted or wanted == MISSING:
                continue
            yield Problem(
                what=f"{group}={option} sets {key}={wanted}, "
                f"but {path} itself sets {key}={recipe_values[key]}.",
                fix=f"{key}={'null' if wanted is None else wanted}",
                keys=(group, key),
            )


def _typed(
    values: Mapping[str, Any], asked: Mapping[str, Any], path: Path, problems: list[Problem]
) -> Config | None:
    """Merge values into the schema one by one, so that every wrong type is told and not just the first.

    Args:
        values: What the recipe and its parts set.
        asked: What the command line sets instead.
        path: The recipe's file.
        problems: What is wrong is added here.

    Returns:
        The configuration without the values that do not fit; None if one is missing or leads nowhere.
    """
    merged = OmegaConf.structured(Config)
    for given, where in ((values, f" (in {path})"), (asked, "")):
        for key, value in given.items():
            # A wrong value of a recipe that the command line replaces harms nobody.
            if not _fits(merged, key, value) and (key not in asked or not where):
                problems.append(_wrong_type(key, value, where))
    unresolved = list(_unresolved(merged))
    problems += unresolved
    told = {key for problem in problems for key in problem.keys}
    complete = not unresolved
    # A model that was to come from a folder lacks every number, for one reason.
    unread = HF_KEY in told or _is_missing(merged, HF_KEY)
    for key in leaf_types():
        if not _is_missing(merged, key):
            continue
        complete = False
        if key not in told and not (unread and key.startswith("model.") and key != HF_KEY):
            what = f"{key} has no value: neither the recipe {path.stem} nor an override sets it."
            problems.append(Problem(what=what, fix=f"{key}={example_of(key)}", keys=(key,)))
    if not complete:
        return None
    config = OmegaConf.to_object(merged)
    return config if isinstance(config, Config) else None


def _fits(merged: DictConfig, key: str, value: Any) -> bool:
    """Set a value; tell whether its key takes it."""
    if key in ONE_OR_SEVERAL and isinstance(value, str | int | float):
        value = [value]
    try:
        if key.startswith(FREE_PREFIX):
            merged.megatron.args[key.removeprefix(FREE_PREFIX)] = value
        else:
            OmegaConf.update(merged, key, value, merge=False)
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError, RecursionError):
        return False
    return True


def _is_missing(merged: DictConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    parent = OmegaConf.select(merged, section) if section else merged
    return OmegaConf.is_missing(parent, name)


def _unresolved(merged: DictConfig) -> Iterator[Problem]:
    """Yield ``${...}`` values that lead nowhere, and put the others in their place."""
    for key, value in list(_leaves(OmegaConf.to_container(merged, resolve=False))):  # type: ignore[arg-type]
        if not (isinstance(value, str | list | dict) and "${" in str(value)):
            continue
        try:
            node = OmegaConf.select(merged, key)
            if OmegaConf.is_config(node):
                OmegaConf.resolve(node)
            else:
                OmegaConf.update(merged, key, node, merge=False)
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            reason = (str(error).strip() or "not understood").splitlines()[0]
            yield Problem(
                what=f"{key}={value} cannot be resolved: {reason}.",
                fix=f"give {key} a plain value",
                keys=(key,),
            )


def _wrong_type(key: str, value: Any, where: str) -> Problem:
    shown = "null" if value is None else str(value)
    shown = shown if len(shown) <= 120 else shown[:120] + "..."
    members = enum_members(key)
    near = nearest(str(value), members, count=1)
    takes = f"it takes {describe_type(key)}"
    if is_list(key) and isinstance(value, list):
        takes = "the items of its list are texts, which null, lists and mappings are not"
    fix = f"{key}={near[0] if near else example_of(key)}"
    if is_list(key) and isinstance(value, str | int | float) and value != "":
        fix = override(key, [str(value)])
    return Problem(what=f"{key}={shown}{where}: {takes}.", fix=fix, keys=(key,))
