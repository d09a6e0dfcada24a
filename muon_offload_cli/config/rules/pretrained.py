"""Models from a Hugging Face folder: weights, tokenizer, and what is installed for them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.vocabulary import BYTE_SOURCES, tokenizer_folder, uses_hf_tokenizer
from muon_offload_cli.errors import Level, Problem, override

INSTALL_BRIDGE = "pip install megatron-bridge"
_RANDOM = "model.hf_weights=false"


@rule(
    name="hf-weights",
    reason="Without its weights a model would begin at random, which is only right if it was asked for.",
    machine=True,
)
def weights(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse `model.from_hf` whose weights are missing or cannot be loaded, unless random ones are wanted."""
    folder, found = config.model.from_hf, facts.pretrained
    if folder is None or found is None or not config.model.hf_weights:
        return
    keys = ("model.from_hf", "model.hf_weights")
    if found.missing:
        more = f" and {len(found.missing) - 3} more" if found.missing[3:] else ""
        yield Problem(
            what=f"model.from_hf={folder} lacks weights that its index names: "
            f"{', '.join(found.missing[:3])}{more}.",
            fix=f"download them again, or begin with random weights: {_RANDOM}",
            keys=keys,
        )
    elif not found.weight_files:
        yield Problem(
            what=f"model.from_hf={folder} holds no weights (*.safetensors).",
            fix=_RANDOM,
            keys=keys,
        )
    if not found.bridge:
        yield Problem(
            what=f"model.from_hf={folder}: its weights are loaded through Megatron-Bridge, which is not "
            "installed.",
            fix=f"{INSTALL_BRIDGE}, or begin with random weights: {_RANDOM}",
            keys=keys,
            exit_code=3,
        )


@rule(
    name="hf-tokenizer",
    reason="Megatron reads the tokenizers of Hugging Face through transformers.",
    machine=True,
)
def tokenizer(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a tokenizer that is not in the folder, or that nothing installed can read."""
    found = facts.pretrained
    if found is None or not (uses_hf_tokenizer(config) or tokenizer_folder(config)):
        return
    keys = ("model.from_hf", "model.hf_tokenizer")
    if not found.tokenizer:
        yield Problem(
            what=f"model.from_hf={config.model.from_hf} holds no tokenizer (tokenizer.json and its kind).",
            fix=f"download it again, or bytes and random weights: model.hf_tokenizer=false {_RANDOM}",
            keys=keys,
        )
    if not found.transformers:
        yield Problem(
            what=f"model.from_hf={config.model.from_hf}: its tokenizer is read by transformers, which is not "
            "installed.",
            fix="pip install transformers, or leave the tokenizer: model.hf_tokenizer=false",
            keys=keys,
            exit_code=3,
        )


@rule(name="hf-bytes", reason="Weights know the numbers of their own tokenizer, not those of bytes.")
def byte_tokens(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of byte tokens for weights that were trained on others."""
    model, source = config.model, config.data.source
    if model.from_hf is None or not model.hf_weights:
        return
    if source in BYTE_SOURCES and not tokenizer_folder(config):
        yield Problem(
            what=f"data.source={source.name} gives bytes as tokens, and the weights of "
            f"model.from_hf={model.from_hf} were trained on those of their own tokenizer.",
            fix="prepare an indexed set with that tokenizer, or begin with random weights: " + _RANDOM,
            keys=("data.source", "model.hf_weights"),
            level=Level.WARNING,
        )


def in_its_file(problem: Problem, from_file: Mapping[str, str]) -> Problem:
    """Name the file to correct where a fix sets keys that the model's file decides: it would be contradicted.

    Args:
        problem: What a rule found.
        from_file: Where each key stands in that file.
    """
    try:
        words = shlex.split(problem.fix)
    except ValueError:
        return problem
    if not all(re.fullmatch(r"[\w.]+=.*", word, re.DOTALL) for word in words):
        return problem
    values = dict(word.split("=", 1) for word in words)
    if values.keys().isdisjoint(from_file):
        return problem
    layout = [key for key in problem.keys if key.startswith("parallel.")]
    if layout:
        # The file is right, and the layout does not suit it.
        return replace(problem, fix=f"another {' or '.join(layout)}")
    decided = [f"{from_file[key]}: {value} would do" for key, value in values.items() if key in from_file]
    others = [override(key, value) for key, value in values.items() if key not in from_file]
    return replace(problem, fix="correct " + ", and ".join([*decided, *others]))


@rule(
    name="unused-hf-keys", reason="Without a folder there are no weights and no tokenizer to take or leave."
)
def unused(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse keys of a pretrained model where there is none."""
    if config.model.from_hf is not None:
        return
    for key in ("model.hf_weights", "model.hf_tokenizer"):
        if key in written:
            what = f"{key} is written, and model.from_hf=null never reads it."
            yield Problem(
                what=what, fix="leave it out, or name the folder of a model", keys=(key, "model.from_hf")
            )
