"""Reading YAML files that people wrote, and writing and reading the resolved configuration."""

from __future__ import annotations

import io
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import command, wrong

# A run is described in a few hundred lines; more is some other file given by mistake.
MAX_FILE_BYTES = 1024**2


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a YAML file whose top is a mapping, interpolations left as they are.

    Args:
        path: The file.
        what: What it is, for messages: ``recipe``.

    Raises:
        UserError: Not readable, no UTF-8, malformed (with line and column), empty, or no mapping.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise wrong(f"the {what} {path} is larger than 1 MiB.", f"give the YAML file of a {what}")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise wrong(
            f"the {what} {path} is no UTF-8 text (byte {error.start}).", "save it as UTF-8"
        ) from error
    except OSError as error:
        raise wrong(
            f"the {what} {path} cannot be read: {error.strerror}.", "check: " + command("ls", "-l", path)
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(root, yaml.MappingNode):
            # OmegaConf's own loader refuses a key given twice and reads 3e-3 as a number.
            plain = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
            return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise wrong(f"{place}: malformed YAML: {error.problem}.", f"correct the {what} there") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise wrong(f"{path}: malformed YAML: {first}.", f"correct the {what} there") from error
    except RecursionError as error:
        raise wrong(f"{path}: malformed YAML: nested too deeply.", f"correct the {what} there") from error
    shape = "empty" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
    raise wrong(
        f"the {what} {path} is {shape} where a mapping is due.",
        "write lines such as 'train: {steps: 30}', and parts below 'defaults:'",
    )


def save_config(config: Config, path: Path) -> None:
    """Write a resolved configuration as YAML, replacing `path` in one rename."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(to_yaml(config), encoding="utf-8")
    temporary.replace(path)


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML text, keys in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote.

    Raises:
        UserError: The file cannot be read, or does not match the schema.
    """
    data = read_mapping(path, "resolved configuration")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), data)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        first = str(error).strip().splitlines()[0]
        raise wrong(f"{path} is no configuration of this version: {first}.", "start the run again") from error
    if not isinstance(config, Config):
        raise wrong(f"{path} has no {', '.join(f.name for f in fields(Config))}.", "start the run again")
    return config
