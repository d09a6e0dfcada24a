"""Attaching to Megatron: one name is rebound, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import muon_offload_cli
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.arguments import make_settings
from tests.fakes.drive import directory_on_a_drive


@pytest.fixture
def module() -> Iterator[ModuleType]:
    from megatron.core.optimizer import layer_wise_optimizer

    base = layer_wise_optimizer.Float16OptimizerWithFloat16Params
    yield layer_wise_optimizer
    assert layer_wise_optimizer.Float16OptimizerWithFloat16Params is base


def test_only_the_layer_wise_builder_sees_the_new_class(module: ModuleType, tmp_path: Path) -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    installation = muon_offload_cli.install(directory=directory_on_a_drive(tmp_path))
    installed = module.Float16OptimizerWithFloat16Params
    assert issubclass(installed, Float16OptimizerWithFloat16Params)
    assert installed is not Float16OptimizerWithFloat16Params
    assert optimizer.Float16OptimizerWithFloat16Params is Float16OptimizerWithFloat16Params
    installation.close()
    assert module.Float16OptimizerWithFloat16Params is Float16OptimizerWithFloat16Params


def test_a_list_of_directories_is_shared_by_the_ranks_of_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = directory_on_a_drive(tmp_path)
    both = [folder / "a", folder / "b"]
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
    for wrong in ([], 5, b"/a", [both[0], 5], [both[0], None], [both[0], "relative"], [both[0], both[0]]):
        with pytest.raises(UserError, match="list of such folders, each once"):
            used(wrong, 2)


def test_all_wrong_arguments_are_told_at_once_with_what_to_pass(module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        muon_offload_cli.install(
            directory="relative", engine="tape", chunk_mb=-1, fraction=1.5, host_memory_gb=-2, windows=0
        )
    named = [problem.keys[0] for problem in caught.value.problems]
    assert named == ["engine", "directory", "chunk_mb", "fraction", "host_memory_gb", "windows"]
    fixed = eval(f"dict({', '.join(problem.fix for problem in caught.value.problems)})")
    assert list(fixed) == named
    make_settings(**fixed | {"directory": tmp_path, "ranks_per_node": 1})


NUMBERS = ("chunk_mb", "fraction", "host_memory_gb")
COUNTS = ("ranks_per_node", "windows")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", []),
        ("fraction", 0),
        *((name, value) for name in (*NUMBERS, *COUNTS) for value in ("4", [], True, float("nan"))),
        *((name, 10**400) for name in NUMBERS),
        *((name, 2.5) for name in COUNTS),
    ],
)
def test_an_argument_of_another_kind_is_told_with_its_name(
    module: ModuleType, name: str, value: object
) -> None:
    with pytest.raises(UserError) as caught:
        muon_offload_cli.install(**{"engine": "host", name: value})  # type: ignore[arg-type]
    assert caught.value.problems[0].keys == (name,)


@pytest.mark.parametrize("engine", ["disk", "mapped"])
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("{folder}/file", "{folder}/file is a file, not a folder"),
        ("{folder}/file/below", "{folder}/file is a file, not a folder"),
        ("/dev/shm/state", "memory, not a disk"),
        ("/proc/state", "/proc"),
        ("/a\0b", "it cannot be looked at"),
    ],
)
def test_a_folder_that_cannot_hold_state_is_refused_at_the_call(
    module: ModuleType, tmp_path: Path, engine: str, place: str, why: str
) -> None:
    folder = directory_on_a_drive(tmp_path.resolve())
    (folder / "file").touch()
    with pytest.raises(UserError) as caught:
        muon_offload_cli.install(directory=[folder, place.format(folder=folder)], engine=engine)
    (problem,) = caught.value.problems
    assert why.format(folder=folder) in problem.what
    assert (problem.keys, problem.exit_code) == (("directory",), 3)
    assert [each.name for each in folder.iterdir()] == ["file"]
