"""The summary of a run that stays: what ``summary.json`` holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from muon_offload_cli.config.schema import Config
from muon_offload_cli.launch.bottleneck import Bottleneck, find_bottleneck
from muon_offload_cli.launch.figures import StepSeen
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.job import Outcome
from muon_offload_cli.launch.post_mortem import PostMortem
from muon_offload_cli.launch.verdict import RankVerdict, Verdict
from muon_offload_cli.records import write_whole


@dataclass(kw_only=True, slots=True)
class Failure:
    """Why a run died, as data.

    Attributes:
        rank: The rank that died first; None if no rank could be named.
        what: One sentence.
        cause: The likely cause and what to do; may be empty.
        log: Path of the log with the whole story.
        last_lines: End of that log.
        problems: User errors as ``{"what", "fix", "exit_code"}``.
    """

    rank: int | None
    what: str
    cause: str
    log: str
    last_lines: list[str]
    problems: list[dict[str, str | int]]

    @classmethod
    def of(cls, found: PostMortem) -> Failure:
        """Turn a post-mortem into data."""
        return cls(
            rank=found.rank,
            what=found.what,
            cause=found.cause,
            log=str(found.log or ""),
            last_lines=list(found.last_lines),
            problems=[{"what": p.what, "fix": p.fix, "exit_code": p.exit_code} for p in found.problems],
        )


@dataclass(kw_only=True, slots=True)
class Summary:
    """A finished run.

    Attributes:
        recipe: Its name.
        folder: Absolute path of the run folder.
        started: Local time with its offset, ISO 8601.
        seconds: Wall time of the job, start-up included.
        exit_code: What the command exits with.
        interrupted_by: Number of the signal that ended it, if one was sent to the launcher.
        success: Whether every rank did what was asked for.
        headline: The verdict in one line.
        engine: The backend that was asked for.
        steps: Steps that all ranks of this node have recorded.
        first_loss: Loss of the first step.
        last_loss: Loss of the last step.
        last_grad_norm: Gradient norm of the last step.
        step_seconds: Mean of the slowest rank's step time without the first step; None with one step.
        bytes_read: From disk, all ranks and steps.
        bytes_written: To disk, all ranks and steps.
        gpu_peak_bytes: Largest peak of allocated device memory of a rank.
        ranks: One row a rank.
        digests: Hashes of final weights, masters and momenta by rank, if asked for.
        bottleneck: What bounded the steps; None where nothing was offloaded or one step was taken.
        notes: What ranks said a person should see, each once.
        failure: Why it died; None if it did not.
    """

    recipe: str
    folder: str
    started: str
    seconds: float
    exit_code: int
    interrupted_by: int | None
    success: bool
    headline: str
    engine: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    last_grad_norm: float | None
    step_seconds: float | None
    bytes_read: int
    bytes_written: int
    gpu_peak_bytes: int
    ranks: list[RankVerdict]
    digests: dict[str, dict[str, str]]
    bottleneck: Bottleneck | None = None
    notes: list[str] = field(default_factory=list)
    failure: Failure | None = None

    def to_json(self) -> str:
        """Return the summary as indented JSON."""
        return json.dumps(asdict(self), indent=1)

    def write(self, path: Path) -> OSError | None:
        """Write it to `path`, as `write_whole` does."""
        return write_whole(path, self.to_json() + "\n")


@dataclass(kw_only=True, slots=True)
class Ends:
    """The first and the last step that was seen, kept while a run goes on."""

    first: StepSeen | None = None
    last: StepSeen | None = None

    def see(self, step: StepSeen) -> None:
        """Take one more step."""
        self.first = self.first or step
        self.last = step


def summarize(
    config: Config,
    folder: RunFolder,
    outcome: Outcome,
    verdict: Verdict,
    ends: Ends,
    *,
    started: datetime,
    exit_code: int,
    failure: PostMortem | None,
) -> Summary:
    """Put a finished run together."""
    figures = outcome.figures.values()
    means = [each.step_seconds for each in figures if each.step_seconds is not None]
    notes = [note for report in outcome.reports.values() for note in report.notes]
    return Summary(
        recipe=config.recipe,
        folder=str(folder.root),
        started=started.astimezone().isoformat(timespec="seconds"),
        seconds=round(outcome.seconds, 3),
        exit_code=exit_code,
        interrupted_by=outcome.interrupted_by,
        success=verdict.success and exit_code == 0,
        headline=verdict.headline,
        engine=config.offload.engine.name,
        steps=min((each.steps for each in figures), default=0),
        first_loss=ends.first.loss if ends.first else None,
        last_loss=ends.last.loss if ends.last else None,
        last_grad_norm=ends.last.grad_norm if ends.last else None,
        step_seconds=max(means, default=None),
        bytes_read=sum(each.bytes_read for each in figures),
        bytes_written=sum(each.bytes_written for each in figures),
        gpu_peak_bytes=max((each.last.gpu_peak_bytes for each in figures if each.last), default=0),
        ranks=verdict.ranks,
        digests={str(rank): report.digests for rank, report in outcome.reports.items() if report.digests},
        bottleneck=find_bottleneck(config, figures),
        notes=list(dict.fromkeys(notes)),
        failure=None if failure is None else Failure.of(failure),
    )
