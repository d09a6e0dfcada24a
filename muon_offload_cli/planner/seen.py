"""What an earlier run's metrics say about the time outside the drive."""

from __future__ import annotations

import statistics
from pathlib import Path

from muon_offload_cli.errors import wrong
from muon_offload_cli.records import StepRecord


def compute_seconds(run_folder: Path) -> float:
    """Return the median time of a step less the time in which it waited for the drive, over all ranks.

    The first step is left out where there are others: it warms up.

    Raises:
        UserError: The folder holds no metrics of finished steps.
    """
    found: list[float] = []
    for file in sorted((run_folder / "metrics").glob("rank_*.jsonl")):
        try:
            lines = file.read_text().splitlines()
            records = [StepRecord.from_json(line) for line in lines if line.strip()]
        except (OSError, ValueError, TypeError) as error:
            raise wrong(f"--run {run_folder}: {file.name} cannot be read: {error}.") from error
        found += [record.seconds - record.wait_s for record in (records[1:] or records)]
    if not found:
        raise wrong(
            f"--run {run_folder}: there are no metrics of finished steps in it.",
            "give the run folder of an earlier run, which holds metrics/rank_0.jsonl",
        )
    return max(0.0, statistics.median(found))
