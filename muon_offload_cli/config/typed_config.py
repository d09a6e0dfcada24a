"""Values put into the schema key by key, so that every wrong type and every missing value is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muon_offload_cli.config.hf_file import KEY as HF_KEY
from muon_offload_cli.config.keys import (
    FREE_PREFIX,
    ONE_OR_SEVERAL,
    describe_type,
    enum_members,
    example_of,
    leaf_types,
    nearest,
)
from muon_offload_cli.config.overrides import is_list, short
from muon_offload_cli.config.recipe_file import leaves
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem, override


def typed_config(
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
    problems += _wrong_types(merged, values, asked, path)
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


def wrong_types(values: Mapping[str, Any], asked: Mapping[str, Any], path: Path) -> list[Problem]:
    """Return what `typed_config` says of wrong types, of values that make no whole configuration."""
    return list(_wrong_types(OmegaConf.structured(Config), values, asked, path))


def _wrong_types(
    merged: DictConfig, values: Mapping[str, Any], asked: Mapping[str, Any], path: Path
) -> Iterator[Problem]:
    """Set every value in `merged`, and yield those that their keys do not take."""
    for given, where in ((values, f" (in {path})"), (asked, "")):
        for key, value in given.items():
            # A wrong value of a recipe that the command line replaces harms nobody.
            if not _fits(merged, key, value) and (key not in asked or not where):
                yield _wrong_type(key, value, where)


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
    for key, value in list(leaves(OmegaConf.to_container(merged, resolve=False))):  # type: ignore[arg-type]
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
    shown = "null" if value is None else short(str(value))
    members = enum_members(key)
    near = nearest(str(value), members, count=1)
    takes = f"it takes {describe_type(key)}"
    if is_list(key) and isinstance(value, list):
        takes = "the items of its list are texts, which null, lists and mappings are not"
    fix = f"{key}={near[0] if near else example_of(key)}"
    if is_list(key) and isinstance(value, str | int | float) and value != "":
        fix = override(key, [str(value)])
    return Problem(what=f"{key}={shown}{where}: {takes}.", fix=fix, keys=(key,))
