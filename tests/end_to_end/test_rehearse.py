"""Recipes rehearsed on CPU ranks; the run that the project exists for every time, all others by night."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muon_offload_cli.config.locations import find_recipes

REPOSITORY = Path(__file__).parents[2]


OTHERS = sorted(set(find_recipes()) - {"qwen35_35b"})


def test_qwen35_35b_trains_dies_and_resumes_to_the_same_bits(directory: Path) -> None:
    told = rehearse("qwen35_35b", directory)
    assert "layers: gated delta net, gated softmax attention" in told
    assert "layout TP2/EP4" in told


def test_peers_that_cut_other_chunks_stop_before_the_first_step_and_leave_nothing(directory: Path) -> None:
    fault = json.dumps({"rank": 1, "kind": "chunks"})
    done = run("tests.end_to_end.launcher", "tiny", directory, {"FAULT": fault})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "tensor-parallel peers cut their dense parameters into different chunks: rank 0" in done.stderr
    assert "straight  0 steps" in done.stdout
    assert list(directory.iterdir()) == []
    directory.rmdir()


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_every_recipe_trains_dies_and_resumes_to_the_same_bits(name: str, directory: Path) -> None:
    rehearse(name, directory)


def rehearse(name: str, directory: Path) -> str:
    done = run("muon_offload_cli.cli.main", name, directory)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the same weights, masters and momenta, bit for bit" in done.stdout
    assert list(directory.iterdir()) == []
    directory.rmdir()
    return done.stdout


def run(
    module: str, name: str, directory: Path, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = ["train", f"recipe={name}", f"offload.directory={directory}", "--rehearse"]
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | (more or {}),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
