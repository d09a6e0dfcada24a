"""Short real runs: the launcher, torchrun, Megatron on CPU ranks, and a model of a few thousand weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muon_offload_cli.records import RankReport, StepRecord
from tests.fakes.fake_torchrun import HANG_S

REPOSITORY = Path(__file__).parents[2]
SMALL = (
    "recipe=tiny",
    "device=cpu",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.moe.num_experts=4",
    "model.moe.ffn_hidden_size=64",
    "model.vocab_size=256",
    "data=mock",
    "train.sequence_length=64",
    "train.global_batch=8",
    "train.steps=6",
    "offload.chunk_mb=0.03",
    "run.digest=true",
)
TP2_EP2 = ("launcher=four_ranks", "parallel=tp2_ep2")
DP2 = ("launcher=two_ranks", "parallel=data")
TP2 = ("launcher=two_ranks", "parallel=tp2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has ended.

    Attributes:
        folder: Its run folder.
        exit_code: Of the launcher.
        output: What the launcher printed, both streams.
        seconds: How long it took.
    """

    folder: Path
    exit_code: int
    output: str
    seconds: float

    @property
    def reports(self) -> dict[int, RankReport]:
        reports = [RankReport.read(path) for path in self.folder.glob("reports/rank_*.json")]
        return {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}

    def records(self, rank: int) -> list[StepRecord]:
        path = self.folder / "metrics" / f"rank_{rank}.jsonl"
        # What follows the last newline is still being written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [StepRecord.from_json(line) for line in lines]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def curve(self, rank: int) -> list[tuple[int, float | None, float | None]]:
        """Step, loss and gradient norm, which must be equal to the last bit."""
        return [(record.step, record.loss, record.grad_norm) for record in self.records(rank)]


def command(folder: Path, *words: str, faulty: bool = False, moe: bool = True) -> list[str]:
    module = "tests.end_to_end.launcher" if faulty else "muon_offload_cli.cli.main"
    # A resident run reads no chunk size, and is refused one.
    unread = (*(("offload.",) if "offload=none" in words else ()), *(() if moe else ("model.moe.",)))
    small = [word for word in SMALL if not word.startswith(unread)]
    return [sys.executable, "-m", module, "train", *small, f"run.directory={folder}", *words]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [more.pop("first_on_path", ""), str(REPOSITORY)]))
    return os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "default"} | more


def train(
    folder: Path,
    *words: str,
    fault: dict[str, Any] | None = None,
    moe: bool = True,
    timeout_s: float = HANG_S,
    **more: str,
) -> Run:
    """Run to the end; `fault` goes to the worker of the tests, see `tests.end_to_end.worker`."""
    if fault is not None:
        more["FAULT"] = json.dumps(fault)
    began = time.monotonic()
    done = subprocess.run(
        command(folder, *words, faulty=fault is not None, moe=moe),
        env=environment(**more),
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Run(folder=folder, exit_code=done.returncode, output=done.stdout, seconds=time.monotonic() - began)


def state(directory: Path) -> tuple[str, str]:
    """Words that put the state on disk in `directory`."""
    return "offload=disk", f"offload.directory={directory}"
