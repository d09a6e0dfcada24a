"""The run that the project exists for, rehearsed on CPU ranks: gated delta nets, TP2/EP4, state on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_qwen35_35b_trains_dies_and_resumes_to_the_same_bits(directory: Path, tmp_path: Path) -> None:
    words = ["train", "recipe=qwen35_35b", f"offload.directory={directory}", "--rehearse"]
    done = subprocess.run(
        [sys.executable, "-m", "muon_offload_cli.cli.main", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "layers: gated delta net, gated softmax attention" in done.stdout
    assert "layout TP2/EP4" in done.stdout
    assert "the same weights, masters and momenta, bit for bit" in done.stdout
    assert list(directory.iterdir()) == []
    directory.rmdir()
