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

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muon_offload_cli.config.from_hf import HfModel, read_model
from muon_offload_cli.config.hf_file import KEY as HF_KEY
from muon_offload_cli.config.locations import group_options, shipped_directory
from muon_offload_cli.config.overrides import (
    Overrides,
    sort_overrides,
)
from muon_offload_cli.config.recipe_file import checked_defaults, find_recipe, leaves, values_of
from muon_offload_cli.config.rules import MachineFacts, check, refuses
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.typed_config import typed_config, wrong_types
from muon_offload_cli.config.yaml_files import read_mapping
from muon_offload_cli.errors import Problem, UserError, wrong

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
        own: What the recipe and its parts have for keys that the command line sets.
        from_file: Where in the file of a Hugging Face model each key stands that it decides.
    """

    config: Config
    written: frozenset[str]
    own: Mapping[str, Any]
    from_file: Mapping[str, str]


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
    defaults = checked_defaults(body.pop("defaults", []), path, options, problems)
    recipe_values = values_of(body, path, options, problems)
    if problems:
        # Without its parts a recipe lacks values, and saying so of each would hide the cause.
        problems += wrong_types(recipe_values, asked.values, path)
        raise UserError(problems=[*asked.problems, *problems])
    problems = asked.problems

    parts = dict(leaves(_compose_parts({**defaults, **asked.parts})))
    problems += _hidden_parts(asked, options, parts, recipe_values, path)
    own_values = {**recipe_values, "recipe": path.stem}
    values: dict[str, Any] = {**parts, **own_values}
    given = values.keys() | asked.values.keys()
    pretrained = _pretrained({**values, **asked.values}, problems)
    if pretrained is not None:
        values = {**pretrained.values(), **parts, **pretrained.released(), **own_values}
    config = typed_config(values, asked.values, path, problems)
    written = _written(asked, recipe_values)
    own = {key: values[key] for key in asked.values if key in values}
    from_file = {} if pretrained is None else pretrained.decided()
    if config is not None and pretrained is not None:
        config.model.from_hf = str(pretrained.folder)
        problems += pretrained.contradictions(config, given, written)
    if config is None or problems:
        raise UserError(problems=[*problems, *_also_wrong(config, written, own, from_file, problems)])
    return Composition(config=config, written=written, own=own, from_file=from_file)


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


def _also_wrong(
    config: Config | None,
    written: frozenset[str],
    own: Mapping[str, Any],
    from_file: Mapping[str, str],
    told: Sequence[Problem],
) -> list[Problem]:
    """Return what the rules refuse of the rest, so that one look shows everything.

    What a refused word was meant to change is left out: it would be judged by the value that it replaces.
    """
    if config is None:
        return []
    # A group's name stands for all of its keys.
    unclear = {key for problem in told for key in problem.keys}
    found = refuses(check(config, written, MachineFacts(), here=False, own=own, from_file=from_file))
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
        for key in dict(leaves({group: read_mapping(options[group][option], "part")})):
            wanted = parts.get(key)
            if key in asked.values or recipe_values.get(key, wanted) == wanted or wanted == MISSING:
                continue
            yield Problem(
                what=f"{group}={option} sets {key}={wanted}, "
                f"but {path} itself sets {key}={recipe_values[key]}.",
                fix=f"{key}={'null' if wanted is None else wanted}",
                keys=(group, key),
            )
