"""A checkout that brings a chunked offloader: every engine trains there, to the same last bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.planned import assert_as_planned
from tests.end_to_end.runs import DP2, Run, train

CHECKOUT = os.environ.get("MUON_OFFLOAD_MEGATRON_PATH", "")
PINNED = (
    "offload=none",
    "megatron.args.chunked_optimizer_state_offload=true",
    "megatron.args.optimizer_state_offload_chunk_size_mb=1",
)

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="MUON_OFFLOAD_MEGATRON_PATH names no checkout of Megatron"),
]


def test_every_engine_gives_the_same_training_on_a_checkout(tmp_path: Path, directory: Path) -> None:
    saving = (f"checkpoint.directory={tmp_path / 'saved'}", "checkpoint.interval=3")
    mapped = ("offload=mapped", f"offload.directory={directory}")
    words = (*DP2, f"megatron.path={CHECKOUT}", "megatron.param_layout=false")
    runs: dict[str, Run] = {}
    for name, more in {
        "none": ("offload=none",),
        "pinned": PINNED,
        "mapped": (*mapped, *saving),
        "resumed": (
            *mapped,
            f"checkpoint.directory={tmp_path / 'again'}",
            f"resume={tmp_path / 'saved' / 'iter_0000003'}",
        ),
        "disk": ("offload=disk", f"offload.directory={directory}"),
        "host": ("offload=host",),
    }.items():
        runs[name] = train(tmp_path / name, *words, *more)
        assert runs[name].exit_code == 0, runs[name].output
    for name, run in runs.items():
        for rank, report in run.reports.items():
            wanted = runs["none"].reports[rank]
            assert report.digests == wanted.digests, (name, rank)
            assert run.curve(rank) == runs["none"].curve(rank)[-len(run.curve(rank)) :], (name, rank)
            assert report.engine == {"pinned": "none", "resumed": "mapped"}.get(name, name)
    assert_as_planned(runs["disk"], *words, "offload=disk", f"offload.directory={directory}")
    pinned = runs["pinned"].reports.values()
    assert all(report.host_bytes == report.muon_state_bytes > 0 for report in pinned)
    for name in ("mapped", "resumed"):
        for rank, report in runs[name].reports.items():
            # Megatron's own offloader takes the embeddings' and norms' state along.
            assert report.disk_bytes >= report.muon_state_bytes > 0
            assert report.adam_disk_bytes > 0
            log = (runs[name].folder / "logs" / f"rank_{rank}.log").read_text()
            assert "in files of" in log
            assert log.index("flushed ") < log.index("saved step")
        assert "has chunked offloader of its own" in runs[name].output
