"""One run at a time saves in a checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muon_offload_cli.checkpoints.listing import list_checkpoints
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import UserError
from muon_offload_cli.launch.claim import claimed


def saving(directory: Path, *words: str) -> Config:
    return compose("tiny", [f"checkpoint.directory={directory}", *words]).config


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    config = saving(tmp_path / "c")
    for _ in range(2):
        with claimed(config):
            used = rf"is in use by another run \(process {os.getpid()} on "
            with pytest.raises(UserError, match=used), claimed(config):
                pass
            with claimed(saving(tmp_path / "other")):
                pass
    assert list_checkpoints(tmp_path / "c") == []


def test_other_nodes_of_a_run_and_runs_that_save_nothing_hold_nothing(tmp_path: Path) -> None:
    nodes = ("launcher.nodes=2", "launcher.node_rank=1")
    with claimed(saving(tmp_path / "c")), claimed(saving(tmp_path / "c", *nodes)):
        pass
    with claimed(compose("tiny", []).config):
        pass


def test_a_place_without_locks_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with claimed(saving(tmp_path / "file" / "c")):
        pass
