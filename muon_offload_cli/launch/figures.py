"""Figures of a run in constant memory: per-rank sums, and steps merged over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from muon_offload_cli.records import StepRecord


@dataclass(kw_only=True, slots=True)
class SteadySums:
    """Sums over steps; see `StepRecord` for the words.

    Attributes:
        steps: How many steps.
        seconds: Wall time.
        wait_s: Seconds in which the device stood still for state.
        io_wait_s: Part of them for which the disk is to blame.
        io_busy_s: Seconds in which the disk worked.
        bytes_moved: Bytes read from and written to disk.
    """

    steps: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    io_wait_s: float = 0.0
    io_busy_s: float = 0.0
    bytes_moved: int = 0

    def add(self, record: StepRecord) -> None:
        """Add one step."""
        self.steps += 1
        self.seconds += record.seconds
        self.wait_s += record.wait_s
        self.io_wait_s += record.io_wait_s
        self.io_busy_s += record.io_busy_s
        self.bytes_moved += record.bytes_read + record.bytes_written


@dataclass(kw_only=True, slots=True)
class RankFigures:
    """What the step records of one rank add up to.

    Attributes:
        steps: Records seen.
        steps_by_engine: Steps whose Muon state came from a backend, by its name; a step that moved
            no chunk counts as ``none``.
        last: The newest record.
        bytes_read: Bytes read from disk.
        bytes_written: Bytes written to disk.
        steady: Sums over all steps after the first, which pays for warm-up.
    """

    steps: int = 0
    steps_by_engine: dict[str, int] = field(default_factory=dict)
    last: StepRecord | None = None
    bytes_read: int = 0
    bytes_written: int = 0
    steady: SteadySums = field(default_factory=SteadySums)

    def add(self, record: StepRecord) -> None:
        """Count one more step."""
        engine = record.engine if record.chunks else "none"
        self.steps_by_engine[engine] = self.steps_by_engine.get(engine, 0) + 1
        if self.steps:
            self.steady.add(record)
        self.steps += 1
        self.bytes_read += record.bytes_read
        self.bytes_written += record.bytes_written
        self.last = record

    @property
    def step_seconds(self) -> float | None:
        """Mean wall time of a step without the first; None before the second."""
        return self.steady.seconds / self.steady.steps if self.steady.steps else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """One step that every rank of this node has finished.

    Attributes:
        step: Iteration number, from 1.
        loss: From a rank that computes it; None if none of this node does.
        grad_norm: Global gradient norm; None if the step was skipped.
        learning_rate: Of the first parameter group.
        seconds: Of the slowest rank.
        read_bytes_per_s: Disk reads of all ranks over `seconds`.
        write_bytes_per_s: Disk writes of all ranks over `seconds`.
        wait_s: Longest wait of a rank for its state.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    seconds: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    wait_s: float


def merge(records: list[StepRecord]) -> StepSeen:
    """Merge the records of one step over ranks; `records` is not empty."""
    seconds = max(record.seconds for record in records)
    per_s = 1 / seconds if seconds > 0 else 0.0
    return StepSeen(
        step=records[0].step,
        loss=_first([record.loss for record in records]),
        grad_norm=_first([record.grad_norm for record in records]),
        learning_rate=_first([record.learning_rate for record in records]),
        seconds=seconds,
        read_bytes_per_s=sum(record.bytes_read for record in records) * per_s,
        write_bytes_per_s=sum(record.bytes_written for record in records) * per_s,
        wait_s=max(record.wait_s for record in records),
    )


def _first(values: list[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)
