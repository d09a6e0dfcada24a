"""Weights of a Hugging Face model, loaded through Megatron-Bridge before the optimizer is built.

Master weights are born from the model's weights, so what is loaded here is what they hold. The bridge logs
a warning for a parameter that it has no name for, or whose weight the folder lacks, and leaves it as it was;
here every parameter is NaN beforehand, and one that still is ends the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron.substitute import Substitutions

SHOWN = 4
_VISION = "Qwen3_5MoeForConditionalGeneration"
"""Its bridge looks for the language model below ``language_model``, next to a vision tower."""


def watch_for_weights(config: Config, stack: Substitutions) -> None:
    """Load the weights of `model.from_hf` as soon as the model is built, if any are to be loaded.

    Args:
        config: Resolved; a run that goes on from a checkpoint has its weights there.
        stack: Until it is closed.
    """
    model, resume = config.model, config.resume
    if model.from_hf is None or not model.hf_weights or resume.step is not None:
        return
    folder = Path(model.from_hf)
    from megatron.training import training

    build = training.get_megatron_optimizer

    def get_megatron_optimizer(settings: Any, chunks: Any, *args: Any, **kwargs: Any) -> Any:
        # Code in the folder is run where Megatron's own flag for tokenizers allows it.
        trusted = bool(getattr(training.get_args(), "trust_remote_code", False))
        load_weights(list(chunks), folder, tied=model.tied_embeddings, trust_remote_code=trusted)
        print(f"loaded the weights of {folder} through Megatron-Bridge", flush=True)
        return build(settings, chunks, *args, **kwargs)

    stack.replace(training, "get_megatron_optimizer", get_megatron_optimizer)


def load_weights(chunks: list[Any], folder: Path, *, tied: bool, trust_remote_code: bool = False) -> None:
    """Fill a model with the weights of a folder.

    Args:
        chunks: Model chunks of this rank, wrapped or not; every rank of the world calls this.
        folder: Of the Hugging Face model.
        tied: The output layer uses the embedding's weight.
        trust_remote_code: Run code of the folder, which some models need for their config.

    Raises:
        UserError: Megatron-Bridge is missing or cannot read the folder, or some parameter got no weight.
    """
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise wrong(
            f"model.from_hf={folder}: Megatron-Bridge cannot be imported: {error}.",
            "pip install megatron-bridge, or begin with random weights: model.hf_weights=false",
            "model.from_hf",
        ) from error
    from megatron.core.utils import unwrap_model

    models = list(unwrap_model(chunks))
    for model in models:
        # The bridge asks the config, where its own models have it.
        model.config.share_embeddings_and_output_weights = tied
    with torch.no_grad():
        for _, values in _loaded(models):
            values.fill_(float("nan"))
    try:
        bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=trust_remote_code)
        bridge.load_hf_weights(_as_bridge_knows(models, folder))
    except (ValueError, KeyError, OSError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise wrong(
            f"model.from_hf={folder}: Megatron-Bridge cannot load it: {first}.",
            "see the rank's log; model.hf_weights=false begins with random weights",
            "model.from_hf",
        ) from error
    left = [name for name, values in _loaded(models) if bool(values.isnan().any())]
    if left:
        more = f" and {len(left) - SHOWN} more" if left[SHOWN:] else ""
        raise wrong(
            f"model.from_hf={folder}: no weight came for {', '.join(left[:SHOWN])}{more}. Megatron-Bridge "
            "knows the layers of Transformer Engine, and not all of Megatron's local ones.",
            "install Transformer Engine, or begin with random weights: model.hf_weights=false",
            "model.from_hf",
        )


def _loaded(models: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint of the model brings: parameters, and the biases that balance experts."""
    for model in models:
        yield from model.named_parameters()
        for name, values in model.named_buffers():
            if name.endswith("expert_bias"):
                yield name, values


def _as_bridge_knows(models: list[Any], folder: Path) -> list[Any]:
    """Return the models under the names that the bridge of the folder's architecture has for them."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if _VISION not in (described.get("architectures") or []):
        return models
    return [_WithoutVision(model) for model in models]


class _WithoutVision(torch.nn.Module):
    """A language model where a bridge expects a model that sees as well."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model
        self.config = language_model.config
        self.pg_collection = getattr(language_model, "pg_collection", None)
