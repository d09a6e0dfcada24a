"""Comparing the plan with Megatron's own modules and owners, built on the meta device in a subprocess."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muon_offload_cli.config.probing import importing, last_object
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.yaml_files import save_config
from muon_offload_cli.errors import Problem, UserError, wrong
from muon_offload_cli.planner.distribution import Share, ranks_by_place
from muon_offload_cli.planner.plan import Planner
from muon_offload_cli.planner.tensors import Layers, Optimizer, TensorInfo

MODULE = "muon_offload_cli.megatron.exact"
TIMEOUT_S = 600.0

MOST_RANKS = 8
"""Ranks that are built unless more are asked for; a kind beyond them differs in its owners alone."""

_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """What the comparison found.

    Attributes:
        layers: What Megatron built them from.
        ranks: Ranks that were built.
        tensors: Tensors that were compared.
        found: One sentence a difference.
    """

    layers: Layers
    ranks: tuple[int, ...]
    tensors: int
    found: tuple[str, ...]


def compare_with_megatron(config: Config, planner: Planner, ranks: str | None) -> Differences:
    """Build chosen ranks and compare names, shapes, optimizers and owners in order.

    Args:
        config: The run, resolved.
        planner: What is compared.
        ranks: Global ranks joined by commas; None: one of each kind, at most `MOST_RANKS`.

    Raises:
        UserError: A rank that does not exist, or Megatron cannot build the model (with its reason).
    """
    chosen = _chosen(planner, ranks)
    answer = _ask(config, chosen)
    if answer.get("problems"):
        raise UserError(
            problems=[
                Problem(
                    what=str(problem.get("what", "")),
                    fix=str(problem.get("fix", "")),
                    exit_code=int(problem.get("exit_code", 2)),
                )
                for problem in answer["problems"]
            ]
        )
    built_from = Layers.TRANSFORMER_ENGINE if answer.get("transformer_engine") else Layers.LOCAL
    if built_from is not planner.layers:
        # Megatron's own layers stand in where Transformer Engine cannot be built without a GPU.
        planner = Planner(config, built_from, compact=planner.compact)
    found: list[str] = []
    tensors = 0
    for rank in chosen:
        entries = answer["ranks"][str(rank)]
        tensors += len(entries)
        found += compare_rank(rank, *planner.of_rank(rank), entries)
    if len(found) > _SHOWN:
        found = [*found[:_SHOWN], f"and {len(found) - _SHOWN} more differences"]
    return Differences(layers=built_from, ranks=tuple(chosen), tensors=tensors, found=tuple(found))


def compare_rank(
    rank: int, held: tuple[TensorInfo, ...], share: Share, entries: list[dict[str, Any]]
) -> list[str]:
    """Return one sentence for each difference between a planned rank and Megatron's.

    Args:
        rank: Its number.
        held: Its planned tensors, in order.
        share: What it is planned to keep state for.
        entries: What Megatron built, as `MODULE` prints it.
    """
    found = []
    staged = max((tensor.chunk for tensor in held), default=0) > 0
    owned = {id(tensor) for tensor in share.muon}
    if len(held) != len(entries):
        found.append(f"rank {rank}: {len(held)} tensors planned, Megatron builds {len(entries)}")
    for tensor, entry in zip(held, entries, strict=False):
        name = f"{tensor.chunk}:{tensor.name}" if staged else tensor.name
        planned = (name, list(tensor.shape), str(tensor.optimizer), tensor.expert)
        built = (entry["name"], entry["shape"], entry["optimizer"], entry["expert"])
        if planned != built:
            found.append(f"rank {rank}: planned {_spell(planned)}, Megatron builds {_spell(built)}")
            # One tensor too many shifts all that follow; the first one names the cause.
            break
        if tensor.optimizer is Optimizer.MUON and (id(tensor) in owned) is not bool(entry["owner"]):
            owner = "owns" if entry["owner"] else "does not own"
            found.append(f"rank {rank}: Megatron's rank {owner} {name}, the planned one differs")
    adam = sum(entry["owned_numel"] for entry in entries if entry["optimizer"] == "adam")
    if not found and adam != share.adam_elements:
        found.append(
            f"rank {rank}: Adam's state of {share.adam_elements} elements planned, Megatron keeps {adam}"
        )
    return found


def _spell(entry: tuple[str, list[int], str, bool]) -> str:
    name, shape, optimizer, expert = entry
    return f"{name} {shape} ({optimizer}{', expert' * expert})"


def _chosen(planner: Planner, ranks: str | None) -> list[int]:
    world = planner.inventory.sizes.world_size
    if ranks is None:
        firsts = sorted(own[0] for own in ranks_by_place(planner.inventory.sizes).values())
        step = max(1, -(-len(firsts) // MOST_RANKS))
        return firsts[::step]
    try:
        chosen = [int(word) for word in ranks.split(",")]
    except ValueError as error:
        raise wrong(f"--ranks {ranks} is no list of ranks.", "--ranks 0,1") from error
    missing = [rank for rank in chosen if not 0 <= rank < world]
    if missing:
        raise wrong(f"--ranks {ranks}: there is no rank {missing[0]} among {world}.", "--ranks 0")
    return chosen


def _ask(config: Config, ranks: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resolved.yaml"
        save_config(config, path)
        environment = importing(config.megatron.path)
        command = [sys.executable, "-m", MODULE, str(path), "--ranks", ",".join(map(str, ranks))]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise wrong(f"--exact gave no answer in {TIMEOUT_S:g} s.", "--ranks 0") from error
    answer = last_object(done.stdout)
    if answer is not None:
        return answer
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return {
        "problems": [{"what": f"--exact: Megatron could not build the model: {last[:300]}", "exit_code": 2}]
    }
