"""Composed runs for the planner's tests."""

from __future__ import annotations

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.schema import Config
from muon_offload_cli.planner.plan import Planner
from muon_offload_cli.planner.tensors import Layers, Optimizer, TensorInfo

DATA_PARALLEL = ("parallel=data",)


def config(recipe: str, *words: str) -> Config:
    return compose(recipe, ["device=cpu", *words]).config


def planner(recipe: str, *words: str, layers: Layers = Layers.LOCAL) -> Planner:
    return Planner(config(recipe, *words), layers)


def tensor(numel: int, *, optimizer: Optimizer = Optimizer.MUON, expert: bool = False) -> TensorInfo:
    shape = (1, numel) if optimizer is Optimizer.MUON else (numel,)
    return TensorInfo(name="weight", shape=shape, optimizer=optimizer, numel=numel, expert=expert)
