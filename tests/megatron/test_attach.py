"""Attaching to Megatron: one name is rebound, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import muon_offload_cli
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.attach import make_settings


@pytest.fixture
def module() -> Iterator[ModuleType]:
    from megatron.core.optimizer import layer_wise_optimizer

    base = layer_wise_optimizer.Float16OptimizerWithFloat16Params
    yield layer_wise_optimizer
    assert layer_wise_optimizer.Float16OptimizerWithFloat16Params is base


def test_only_the_layer_wise_builder_sees_the_new_class(module: ModuleType, tmp_path: Path) -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    installation = muon_offload_cli.install(directory=tmp_path)
    installed = module.Float16OptimizerWithFloat16Params
    assert issubclass(installed, Float16OptimizerWithFloat16Params)
    assert installed is not Float16OptimizerWithFloat16Params
    assert optimizer.Float16OptimizerWithFloat16Params is Float16OptimizerWithFloat16Params
    installation.close()
    assert module.Float16OptimizerWithFloat16Params is Float16OptimizerWithFloat16Params


def test_a_list_of_directories_is_shared_by_the_ranks_of_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setenv("LOCAL_RANK", "3")

    def used(directory: object, ranks: int) -> tuple[Path, ...]:
        given = make_settings(
            directory=directory,  # type: ignore[arg-type]
            engine="disk",
            chunk_mb=1,
            fraction=1,
            host_memory_gb=0,
            ranks_per_node=ranks,
            windows=2,
        )
        return given.directories

    assert used(both, 4) == (both[1],)
    assert used(both, 1) == used(both, 3) == tuple(both)
    assert used(both[0], 4) == used(str(both[0]), 1) == (both[0],)
    for wrong in ([], [both[0], "relative"], [both[0], both[0]]):
        with pytest.raises(UserError, match="list of such folders, each once"):
            used(wrong, 2)


def test_all_wrong_arguments_are_told_at_once(module: ModuleType) -> None:
    with pytest.raises(UserError) as caught:
        muon_offload_cli.install(
            directory="relative", engine="tape", chunk_mb=-1, fraction=1.5, host_memory_gb=-2, windows=0
        )
    named = [problem.keys[0] for problem in caught.value.problems]
    assert named == ["engine", "directory", "chunk_mb", "fraction", "host_memory_gb", "windows"]
