"""Every parameter of chosen ranks, as Megatron itself builds and shares them out.

``python -m muon_offload_cli.megatron.exact CONFIG.yaml [--ranks 0,1]`` prints one JSON object as its last
line::

    {"megatron_version": "0.19.2", "transformer_engine": false, "world_size": 4, "padded_vocab_size": 512,
     "ranks": {"0": [{"name": "decoder.layers.0...", "shape": [512, 256], "dtype": "bfloat16",
                      "optimizer": "muon", "expert": false, "tensor_parallel": true,
                      "owner": true, "owned_numel": 131072}, ...]}}

in the order of ``named_parameters`` (virtual stages one after another, each name then preceded by its
stage: ``1:decoder...``), or ``{"problems": [{"what": ..., "fix": ..., "exit_code": ...}]}`` if the config
cannot be built. A rank owns a Muon parameter whole or not at all; Adam's are cut by bytes on the layout path,
so `owned_numel` counts the elements of which this rank keeps the state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import UserError, wrong
from muon_offload_cli.megatron.faked_world import FakedWorld, faked_world
from muon_offload_cli.megatron.substitute import Substitutions


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One parameter of one rank, as it lies there after tensor and expert parallelism have cut it.

    Attributes:
        name: Megatron's name inside the model.
        shape: Sizes on this rank.
        dtype: Type of the model's weight, ``bfloat16``.
        optimizer: ``muon`` or ``adam``.
        expert: Owned over the expert data-parallel group instead of the data-parallel one.
        tensor_parallel: Cut over the (expert) tensor-parallel group; else the same on all its ranks.
        owner: This rank keeps state for it.
        owned_numel: Elements of which this rank keeps the state.
    """

    name: str
    shape: list[int]
    dtype: str
    optimizer: str
    expert: bool
    tensor_parallel: bool
    owner: bool
    owned_numel: int


class _Unwrapped(torch.nn.Module):
    """Stands where Megatron would allocate DistributedDataParallel's buffers; keeps the layout for them."""

    def __init__(self, *, module: torch.nn.Module, ddp_config: Any, **given: Any) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = ddp_config
        self.full_param_layout = given.get("full_param_layout")
        self.config = given["config"]
        # Megatron's wrapper hides torch's method of this name behind its list of buffers.
        self.buffers = []  # type: ignore[assignment]


class _Unborn:
    """Stands where Megatron would create masters; keeps the torch optimizer after its parameters were shared
    out."""

    is_stub_optimizer = False

    def __init__(self, optimizer: Any, config: Any, *_: Any) -> None:
        self.optimizer = optimizer
        self.config = config


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shares:
    """Parameters by identity: which are Muon's on any rank, and for which this rank keeps state."""

    muon: frozenset[int]
    owned: frozenset[int]


def inventory(world: FakedWorld, rank: int) -> list[Entry]:
    """Build one rank's modules on the meta device and let Megatron assign their owners.

    Args:
        world: Holds Megatron's parsed arguments.
        rank: Which rank of it to be.

    Returns:
        Its parameters in order of ``named_parameters``, stage by stage.
    """
    with world.rank(rank), Substitutions() as stack:
        chunks = _model(stack)
        shares = _share_out(chunks, world, stack)
        return [
            _entry(name if len(chunks) == 1 else f"{stage}:{name}", parameter, chunk, shares)
            for stage, chunk in enumerate(chunks)
            for name, parameter in _named_parameters(chunk)
        ]


def _model(stack: Substitutions) -> list[_Unwrapped]:
    """Let Megatron's own `get_model` build this rank's virtual stages and lay out their buffers."""
    from megatron.training import training

    from muon_offload_cli.megatron.model import make_model_provider

    stack.replace(training, "DDP", _Unwrapped)
    stack.replace(training, "to_empty_if_meta_device", lambda module, **_: module)
    chunks: list[_Unwrapped] = training.get_model(make_model_provider(transformer_engine=False))
    return chunks


def _share_out(chunks: list[_Unwrapped], world: FakedWorld, stack: Substitutions) -> _Shares:
    """Let Megatron's layer-wise optimizer choose whole parameters for this rank."""
    from megatron.core import optimizer as optimizers
    from megatron.core.optimizer import layer_wise_optimizer
    from megatron.training import training

    if not world.args.use_layer_wise_distributed_optimizer:
        return _Shares(muon=frozenset(), owned=frozenset())
    stack.replace(layer_wise_optimizer, "Float16OptimizerWithFloat16Params", _Unborn)
    build = optimizers._get_megatron_optimizer_based_on_param_groups

    def build_unborn(*, config: Any, skip_megatron_wrapping: bool = False, **given: Any) -> Any:
        if skip_megatron_wrapping:
            return build(config=config, skip_megatron_wrapping=True, **given)
        return _Unborn(None, config)  # Adam's bytes follow from the layout.

    stack.replace(optimizers, "_get_megatron_optimizer_based_on_param_groups", build_unborn)
    config, overrides = training.get_megatron_optimizer_config(world.args)
    built = optimizers.get_megatron_optimizer(config, chunks, config_overrides=overrides)
    owned = frozenset(
        id(parameter)
        for leaf in _leaves(built)
        if leaf.optimizer is not None
        for group in leaf.optimizer.param_groups
        for parameter in group["params"]
    )
    matrices = frozenset(
        id(parameter)
        for chunk in chunks
        for parameter in chunk.parameters()
        if layer_wise_optimizer.is_managed_by_layer_wise_optimizer(parameter)
    )
    return _Shares(muon=matrices, owned=owned)


def _leaves(optimizer: Any) -> Iterator[Any]:
    for child in getattr(optimizer, "chained_optimizers", [optimizer]):
        if child is optimizer:
            yield child
        else:
            yield from _leaves(child)


def _named_parameters(chunk: _Unwrapped) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in chunk.named_parameters():
        bare = name
        # Wrapped for data parallelism and for bf16.
        while bare.startswith("module."):
            bare = bare.removeprefix("module.")
        yield bare, parameter


def _entry(name: str, parameter: torch.nn.Parameter, chunk: _Unwrapped, shares: _Shares) -> Entry:
    muon = id(parameter) in shares.muon
    if muon or chunk.full_param_layout is None:
        owned = parameter.numel() if id(parameter) in shares.owned else 0
    else:
        owned = _owned_bytewise(parameter, chunk.full_param_layout)
    return Entry(
        name=name,
        shape=list(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        optimizer="muon" if muon else "adam",
        expert=not getattr(parameter, "allreduce", True),
        tensor_parallel=bool(getattr(parameter, "tensor_model_parallel", False)),
        owner=owned > 0,
        owned_numel=owned,
    )


def _owned_bytewise(parameter: torch.nn.Parameter, full_layout: Any) -> int:
    """Count the elements of a DistributedOptimizer's parameter that lie in this rank's shard of its bucket.

    Every bucket is cut into equal shards, one a rank (megatron/core/optimizer/distrib_optimizer.py,
    ``_build_model_gbuf_range``).
    """
    from megatron.core import parallel_state

    for key, layout in full_layout.layouts.items():
        if parameter not in layout.param_index_map:
            continue
        start, end, bucket = layout.param_index_map[parameter]
        group = (
            parallel_state.get_expert_data_parallel_group()
            if key.is_expert_parallel
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        bucket_start, bucket_end = layout.bucket_indices[bucket]
        shard = (bucket_end - bucket_start) // group.size()
        first = bucket_start + group.rank() * shard
        return int(max(0, min(end, first + shard) - max(start, first)))
    raise KeyError(f"no buffer holds a parameter of shape {tuple(parameter.shape)}")


def describe(config: Config, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Return what `main` prints for a config.

    Args:
        config: Resolved config.
        ranks: Ranks to build; None: all of them.

    Raises:
        UserError: A rank beyond the world, or Megatron refuses the model; carries its reason.
    """
    from muon_offload_cli.megatron.release import megatron_release

    world_size = config.launcher.nodes * config.launcher.ranks_per_node
    beyond = [rank for rank in ranks or [] if not 0 <= rank < world_size]
    if beyond:
        raise wrong(
            f"--ranks {beyond[0]}: the world has ranks 0 to {world_size - 1}.", f"--ranks {world_size - 1}"
        )
    try:
        with faked_world(config) as world:
            chosen = range(world_size) if ranks is None else ranks
            built = {str(rank): [asdict(entry) for entry in inventory(world, rank)] for rank in chosen}
            return {
                "megatron_version": megatron_release(),
                "transformer_engine": False,
                "world_size": world_size,
                "padded_vocab_size": world.args.padded_vocab_size,
                "ranks": built,
            }
    except (AssertionError, ValueError, RuntimeError, NotImplementedError, ImportError, TypeError) as error:
        # How Megatron refuses a model, at parsing or where a module is built.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise wrong(f"Megatron cannot build the model {config.model.name}: {reason}") from error


def main(arguments: Sequence[str]) -> int:
    """Print one JSON object; Megatron's own lines go to standard error."""
    from muon_offload_cli.config.yaml_files import load_config

    parser = argparse.ArgumentParser(prog="python -m muon_offload_cli.megatron.exact")
    parser.add_argument("config", type=Path, help="a resolved configuration")
    parser.add_argument("--ranks", help="ranks with commas between; default: all")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    try:
        ranks = None if given.ranks is None else [int(rank) for rank in given.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks {given.ranks}: give numbers with commas between")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = describe(load_config(given.config), ranks)
    except UserError as error:
        print(json.dumps({"problems": [asdict(problem) for problem in error.problems]}))
        return error.exit_code
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
