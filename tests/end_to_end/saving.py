"""Words and looks that tests of checkpoints share."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.checkpoints.listing import list_checkpoints
from muon_offload_cli.records import RankReport
from tests.end_to_end.runs import Run
from tests.fakes.fake_torchrun import HANG_S

ONE = ("launcher=one_rank", "parallel=data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A run and where it saved."""

    run: Run
    checkpoints: Path


def engine_words(engine: str, directory: Path) -> tuple[str, ...]:
    if engine in ("disk", "mapped"):
        return f"offload={engine}", f"offload.directory={directory}"
    return (f"offload={engine}",)


def saving(directory: Path, interval: int = 0) -> tuple[str, ...]:
    return f"checkpoint.directory={directory}", *([f"checkpoint.interval={interval}"] if interval else [])


def losses(run: Run) -> dict[int, float]:
    return {record.step: record.loss for record in run.records(0) if record.loss is not None}


def complete(directory: Path) -> list[int]:
    return [each.step for each in list_checkpoints(directory) if each.complete]


def copy_of(single: Saved, tmp_path: Path) -> Path:
    target = tmp_path / "saved"
    subprocess.run(["cp", "-r", str(single.checkpoints), str(target)], check=True)
    return target


def seal_bytes(saved: Path) -> int:
    """Size of the newest checkpoint."""
    sealed = list_checkpoints(saved)[-1].seal
    assert sealed is not None
    return sealed.nbytes


@dataclass
class Started:
    """A launcher that runs, and the first of its ranks."""

    process: subprocess.Popen[str]
    folder: Path

    def report(self) -> RankReport | None:
        try:
            return RankReport.read(self.folder / "reports" / "rank_0.json")
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def wait_for(self, condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def steps(self) -> int:
        path = self.folder / "metrics" / "rank_0.jsonl"
        return path.read_text().count("\n") if path.exists() else 0
