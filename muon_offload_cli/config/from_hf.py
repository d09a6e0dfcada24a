"""``model.from_hf``: numbers of a Hugging Face model for whoever gives none, and a check of those given."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muon_offload_cli.config.changes import spelled
from muon_offload_cli.config.hf_families import Architecture, read_architecture
from muon_offload_cli.config.hf_file import CONFIG, KEY, hf_folder, read_hf_file
from muon_offload_cli.config.model_schema import ModelConfig
from muon_offload_cli.config.rehearsal_model import layers_with_experts, layers_with_linear_attention
from muon_offload_cli.config.rules.settings import value_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem

PART = "from_hf"
"""The part of ``conf/model`` that has no numbers of its own."""
_MAY_GO = "mtp_num_layers"
"""A further token's layers may be left out (null): the others' weights are the same without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HfModel:
    """A model's folder and what its config says.

    Attributes:
        folder: Absolute.
        architecture: By key below ``model.``.
    """

    folder: Path
    architecture: Architecture

    def values(self) -> dict[str, Any]:
        """Return every value by dotted key, for keys that nothing else gives."""
        return {"model.name": self.folder.name, **_keyed(self.architecture.advised | self.architecture.fixed)}

    def released(self) -> dict[str, Any]:
        """Return by dotted key what goes before the values of a part, though not before a recipe's own."""
        return _keyed(self.architecture.released)

    def places(self) -> dict[str, str]:
        """Return by dotted key the place in the file of each value that weights need."""
        return {
            f"model.{key}": f"{name} in {self.folder / CONFIG}"
            for key, name in self.architecture.names.items()
        }

    def decided(self) -> dict[str, str]:
        """Return `places` of the keys that can have no other value."""
        return {key: place for key, place in self.places().items() if key != f"model.{_MAY_GO}"}

    def contradictions(self, config: Config, given: Set[str], written: Set[str]) -> Iterator[Problem]:
        """Yield the keys given by a recipe, its parts or the command line that the file contradicts.

        Args:
            config: The composed run.
            given: Keys that are not filled from the file.
            written: Those of them that no part gives, and that no other part would take away.
        """
        places, other = self.places(), f"or model={PART} to take every number from the file"
        for name, value in self.architecture.fixed.items():
            key = f"model.{name}"
            own = value_of(config, key)
            left_out = name == _MAY_GO and own is None
            if key not in given or left_out or _same(config.model, name, own, value):
                continue
            yield Problem(
                what=f"{key}={spelled(own)}, and {places[key]} makes it {spelled(value)}.",
                fix=f"{key}={spelled(value)}" + (f", {other}" if key not in written else ""),
                keys=(key, KEY),
            )


def read_model(given: str) -> HfModel:
    """Read the model of a folder.

    Raises:
        UserError: With every problem of the folder or its ``config.json``.
    """
    folder = hf_folder(given)
    return HfModel(folder=folder, architecture=read_architecture(read_hf_file(folder)))


def _keyed(values: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{key}": value for key, value in values.items()}


def _same(model: ModelConfig, name: str, own: Any, value: Any) -> bool:
    """Tell whether two values mean the same; patterns of layers are compared layer by layer."""
    patterns = {"moe.layer_freq": layers_with_experts, "linear_attention_freq": layers_with_linear_attention}
    if name not in patterns:
        return bool(own == value)
    other = copy.deepcopy(model)
    holder = other.moe if name.startswith("moe.") else other
    setattr(holder, name.rpartition(".")[2], value)
    try:
        return patterns[name](model) == patterns[name](other)
    except (ValueError, SyntaxError, TypeError, ZeroDivisionError):
        # No pattern at all, which the rules tell.
        return True
