"""What benchmarks of whole runs share: starting one, its figures, and the drive's raw bandwidth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from muon_offload_cli.records import RankReport, StepRecord


def train_command(recipe: str, overrides: list[str], way: str, folder: Path, *words: str) -> list[str]:
    """Return the command of one run.

    Args:
        recipe: Name of the recipe.
        overrides: Further ``key=value`` for it.
        way: Engine, with ``:GIB`` or ``:auto`` for its host-memory budget.
        folder: The run folder; state files lie in ``state`` beside it.
        words: What this run has beyond others.
    """
    engine, _, budget = way.partition(":")
    # What only an offloader reads is refused where there is none.
    read = [word for word in overrides if engine != "none" or not word.startswith("offload.")]
    given = [f"recipe={recipe}", *read, f"offload={engine}", f"run.directory={folder}", *words]
    if engine in ("mapped", "disk"):
        given += [f"offload.directory={folder.parent / 'state'}"]
    if budget:
        given += [f"offload.host_memory_gb={budget}"]
    return [sys.executable, "-m", "muon_offload_cli.cli.main", "train", *given]


def reports_of(folder: Path) -> list[RankReport]:
    """Return the ranks' reports, by rank."""
    return [RankReport.read(path) for path in sorted((folder / "reports").glob("rank_*.json"), key=_rank)]


def steps_of(folder: Path) -> list[list[StepRecord]]:
    """Return the records of all ranks, step by step; a step counts once every rank has taken it."""
    columns = [
        [StepRecord.from_json(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "metrics").glob("rank_*.jsonl"), key=_rank)
    ]
    return [list(step) for step in zip(*columns, strict=False)]


def _rank(path: Path) -> int:
    return int(re.sub(r"\D", "", path.stem))


def losses_of(steps: list[list[StepRecord]]) -> list[float | None]:
    """Return the loss of each step, from the first rank that computes it."""
    return [next((r.loss for r in step if r.loss is not None), None) for step in steps]


def raw_mixed_gb_s(directory: Path, gib: float, read_share: float = 0.5) -> float:
    """Measure the drive with the store benchmark: median of its raw rounds."""
    script = Path(__file__).with_name("store.py")
    command = [sys.executable, str(script), "--directory", str(directory), "--gib", str(gib), "--rounds", "3"]
    command += ["--read-share", str(read_share)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^raw\s+([\d.]+)", done.stdout, flags=re.MULTILINE)
    if found is None:
        raise SystemExit(f"the raw measurement failed: {json.dumps(done.stderr[-500:])}")
    return float(found.group(1))
