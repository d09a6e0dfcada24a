"""What ranks report and the launcher reads: one JSON line a step, one JSON file a rank.

Both sides of the house import this module, so it knows neither torch nor a terminal.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """Figures of one optimizer step on one rank; one line of ``metrics/rank_N.jsonl``.

    Attributes:
        step: Iteration number, counted from 1 as Megatron does.
        loss: Mean language-model loss of the step; None on ranks that do not compute it.
        grad_norm: Global gradient norm before clipping; None if the step was skipped.
        learning_rate: Of the first parameter group.
        seconds: Wall time of the whole iteration.
        engine: The backend that the Muon state of this step was taken from.
        chunks: Chunks stepped from that backend (0: the state was resident).
        bytes_read: Bytes read from disk for this step.
        bytes_written: Bytes written to disk for this step.
        disk_bytes: Muon state that lies on disk between steps.
        host_bytes: Muon state that lies in host memory between steps.
        gpu_bytes: Muon state that lies on the training device between steps.
        wait_s: Seconds in which the device stood still for state to arrive; else it computed.
        io_wait_s: Part of `wait_s` for which the disk is to blame: no more than it was busy.
        io_busy_s: Seconds in which a request to the disk was under way.
        staging_bytes: The most bytes of the staging rings that were ever in use at once.
        pinned_bytes: Host memory that the offloader holds page-locked.
        window_bytes: Device memory of the windows.
        gpu_peak_bytes: Peak allocated device memory so far (0 on CPUs).
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float = 0.0
    engine: str = "none"
    chunks: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    disk_bytes: int = 0
    host_bytes: int = 0
    gpu_bytes: int = 0
    wait_s: float = 0.0
    io_wait_s: float = 0.0
    io_busy_s: float = 0.0
    staging_bytes: int = 0
    pinned_bytes: int = 0
    window_bytes: int = 0
    gpu_peak_bytes: int = 0

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the newline."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read a record; unknown keys are ignored so that newer workers can be read."""
        return cls(**_known(cls, json.loads(line)))


@dataclass(kw_only=True, slots=True)
class RankReport:
    """What one rank holds and how it ended; ``reports/rank_N.json``, rewritten as the run goes on.

    Attributes:
        rank: Global rank.
        pid: Process id on its node.
        host: Host name.
        device: ``cpu`` or the GPU's name.
        engine: Backend that was attached, ``none`` for resident state.
        megatron_version: Version of the Megatron that trained.
        muon_parameters: Elements of the parameters that Muon owns on this rank.
        muon_state_bytes: Their master weights, momentum and, where there is one, second moment.
        adam_state_bytes: State of the sibling optimizers (embeddings, norms) that stays resident.
        adam_disk_bytes: State of theirs that lies on disk; Megatron's own offloader takes it along.
        disk_bytes: Bytes reserved on disk, alignment included.
        host_bytes: Host memory that holds state between steps.
        gpu_bytes: Device memory that holds Muon state between steps.
        chunks: Chunks of the plan.
        build_gpu_peak_bytes: Peak allocated device memory while the optimizer was built, the model with its
            gradient buffers included.
        directory: Where the bytes on disk are, several directories with commas between; empty if none.
        direct_io: Whether the disk is reached with O_DIRECT.
        notes: Sentences that a person should see (a fallback, for example).
        steps: Optimizer steps taken.
        last_step: Number of the last step, or of the step resumed from if none was taken since.
        steps_from_backend: Steps whose Muon state was taken from `engine` in full, and skipped ones.
        saves: Checkpoints saved.
        saved_step: Step of the newest one.
        save_flush_s: Seconds that the newest save waited for write-back.
        save_write_s: Seconds from there to the sealed checkpoint.
        save_memory_bytes: Most that this process's resident memory grew by during any save.
        save_bytes: Size of the newest checkpoint, all ranks together.
        loaded_step: Step of the checkpoint that the run went on from.
        load_s: Seconds that loading it took.
        load_memory_bytes: Most that this process's resident memory grew by meanwhile.
        stopped_at: Step after which the run ended on request (SIGTERM), once it was saved; 0: it did not.
        finished: Whether training ended by itself.
        digests: Hashes of final weights, masters and momenta by kind, if asked for.
        error: Exception text of a rank that failed; empty otherwise.
        problems: User errors that stopped the rank, as ``{"what", "fix", "exit_code"}``.
    """

    rank: int
    pid: int = 0
    host: str = ""
    device: str = ""
    engine: str = "none"
    megatron_version: str = ""
    muon_parameters: int = 0
    muon_state_bytes: int = 0
    adam_state_bytes: int = 0
    adam_disk_bytes: int = 0
    disk_bytes: int = 0
    host_bytes: int = 0
    gpu_bytes: int = 0
    chunks: int = 0
    build_gpu_peak_bytes: int = 0
    directory: str = ""
    direct_io: bool = False
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    last_step: int = 0
    steps_from_backend: int = 0
    saves: int = 0
    saved_step: int = 0
    save_flush_s: float = 0.0
    save_write_s: float = 0.0
    save_memory_bytes: int = 0
    save_bytes: int = 0
    loaded_step: int = 0
    load_s: float = 0.0
    load_memory_bytes: int = 0
    stopped_at: int = 0
    finished: bool = False
    digests: dict[str, str] = field(default_factory=dict)
    error: str = ""
    problems: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write it to `path`. A drive that takes no more ends no run: the report before it stays."""
        write_whole(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a report; unknown keys are ignored."""
        return cls.from_json(path.read_text())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text of a report."""
        return cls(**_known(cls, json.loads(text)))


def _known(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in data.items() if key in names}


def write_whole(path: Path, text: str) -> OSError | None:
    """Replace `path` in one rename, so that a reader never sees half of it.

    Returns:
        What the system said where that cannot be done; what was there before is there still.
    """
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return error
    return None
