"""``muon-offload train``: prepare, start, follow, judge."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from muon_offload_cli.cli.prepare import prepare
from muon_offload_cli.cli.problems import print_problems
from muon_offload_cli.cli.train_view import TrainView, make_console
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.yaml_files import to_yaml
from muon_offload_cli.errors import UserError
from muon_offload_cli.launch.cause import MachineFigures
from muon_offload_cli.launch.claim import sole_saver
from muon_offload_cli.launch.command import by_hand, environment, script, torchrun_command
from muon_offload_cli.launch.figures import StepSeen
from muon_offload_cli.launch.folder import RunFolder, begin_folder, local_ranks, planned_folder
from muon_offload_cli.launch.follow import Event
from muon_offload_cli.launch.job import Outcome, run_job
from muon_offload_cli.launch.post_mortem import Evidence, PostMortem, explain
from muon_offload_cli.launch.preview import preview
from muon_offload_cli.launch.resume import settle_checkpoints
from muon_offload_cli.launch.summary import Ends, summarize
from muon_offload_cli.launch.tail import last_lines
from muon_offload_cli.launch.verdict import STOPPED_EARLY, Verdict, judge
from muon_offload_cli.machine import memory
from muon_offload_cli.tokens.verification import write_tokens


def train_command(
    words: Sequence[str],
    *,
    recipe_directories: Sequence[Path] = (),
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Train a recipe and return the exit code.

    Args:
        words: ``recipe=NAME`` and overrides.
        recipe_directories: Folders of the user's own recipes.
        dry_run: Print the resolved configuration and the script; start and write nothing.
        json: Print the content of ``summary.json`` on standard output and draw on standard error.

    Returns:
        0 fine; 4 training failed, or a rank did not do what was asked for; 5 the run was asked to end by
        SIGTERM, saved and ended before its last step; 130 after Ctrl-C, 143
        after SIGTERM, 129 after SIGHUP.

    Raises:
        UserError: The run is refused, or every rank that failed was stopped by a user error.
    """
    prepared = prepare(words, recipe_directories)
    started, base = datetime.now(), Path.cwd()
    config, remarks = prepared.config, prepared.remarks
    planned = planned_folder(config, now=started, base=base)
    asked = asked_with(words, recipe_directories)
    text = script_text(config, planned, base, asked)
    if dry_run:
        sys.stdout.write(by_hand(to_yaml(config), text, planned))
        print_problems([*remarks, *prepared.chosen])
        return 0
    with sole_saver(config) as claim:
        # Whoever saved there until now may have done so since the run was judged.
        config, chosen = settle_checkpoints(prepared.asked, base)
        if config.megatron.entrypoint is None:
            remarks += write_tokens(config)
        folder = begin_folder(
            config, now=started, base=base, script=lambda folder: script_text(config, folder, base, asked)
        )
        view = TrainView(make_console(stderr=json), total_steps=config.train.steps)
        view.plan(preview(config, folder, prepared.facts))
        print_problems([*remarks, *chosen, *claim.remarks])
        return _run(config, folder, view, started=started, json=json, held=claim.descriptors)


def asked_with(words: Sequence[str], recipe_directories: Sequence[Path], *options: str) -> list[str]:
    """Return the words of the command that asks for a run."""
    directories = [word for each in recipe_directories for word in ("--recipe-dir", str(each))]
    return ["muon-offload", "train", *words, *directories, *options]


def script_text(config: Config, folder: RunFolder, base: Path, asked: Sequence[str]) -> str:
    """Return the script of a run, which is what is run; `asked` is the command that it is made for."""
    command = torchrun_command(config, folder, python=sys.executable)
    settings = environment(config, inherited=os.environ, cores=len(os.sched_getaffinity(0)), base=base)
    return script(command, settings, metrics=folder.metrics, base=base, asked=asked)


def _run(
    config: Config,
    folder: RunFolder,
    view: TrainView,
    *,
    started: datetime,
    json: bool,
    held: Sequence[int],
) -> int:
    ends = Ends()
    kills_before = memory.oom_kills()

    def on_event(event: Event) -> None:
        if isinstance(event, StepSeen):
            ends.see(event)
        view.see(event)

    ranks = local_ranks(config)
    with view.live(), _state_folders_removed(config):
        outcome = run_job(
            ["bash", str(folder.script)],
            folder,
            ranks,
            on_event,
            saves_on_sigterm=config.checkpoint.directory is not None,
            held=held,
        )
    # A save that SIGTERM asked for can fail too.
    told = any(report.problems for report in outcome.reports.values())
    died = outcome.exit_code != 0 and (outcome.interrupted_by is None or told)
    found = explain(evidence_of(config, folder, outcome, kills_before)) if died else None
    verdict = judge(
        config,
        outcome.reports,
        outcome.figures,
        ranks=ranks,
        exit_code=outcome.exit_code,
        endings={found.rank: found.ending} if found is not None and found.rank is not None else None,
    )
    code = exit_code_of(outcome, verdict, found)
    summary = summarize(
        config, folder, outcome, verdict, ends, started=started, exit_code=code, failure=found
    )
    unwritten = summary.write(folder.summary)

    if found is not None and found.problems:
        view.line(f"stopped by rank {found.rank}; its log: {found.log}")
        raise UserError(problems=found.problems)
    view.table(verdict, config.offload.engine.name)
    if found is not None:
        view.death(found)
    if outcome.interrupted_by is not None:
        view.line(f"ended by {signal.Signals(outcome.interrupted_by).name}")
    if summary.bottleneck is not None:
        view.line(summary.bottleneck.text)
        if summary.bottleneck.advice:
            view.line(f"  to change next: {summary.bottleneck.advice}")
    if unwritten is None:
        view.line(f"summary: {folder.summary}")
    else:
        view.line(
            f"run.directory={folder.root} takes no more ({unwritten.strerror}): there is no summary, and "
            "ranks' reports and logs are cut short."
        )
    view.headline(verdict)
    if json:
        print(summary.to_json())
    return code


@contextlib.contextmanager
def _state_folders_removed(config: Config) -> Iterator[None]:
    """Remove the state's folders that the run made: a rank that is killed cannot do that itself."""
    folders = [Path(directory) for directory in config.offload.directory or ()]
    ours = [folder for folder in folders if not folder.exists()]
    try:
        yield
    finally:
        for folder in ours:
            # Not there, or not empty because somebody else uses it: both are fine.
            with contextlib.suppress(OSError):
                folder.rmdir()


def exit_code_of(outcome: Outcome, verdict: Verdict, found: PostMortem | None) -> int:
    """Return what the command exits with."""
    if outcome.exit_code == 0 and verdict.exit_code == STOPPED_EARLY:
        return STOPPED_EARLY
    if outcome.interrupted_by is not None and not verdict.success and not (found and found.problems):
        return 128 + outcome.interrupted_by
    if found is not None:
        return found.exit_code
    return verdict.exit_code


def evidence_of(config: Config, folder: RunFolder, outcome: Outcome, kills_before: int | None) -> Evidence:
    """Gather what is known of a job that died.

    Args:
        config: What was run.
        folder: Its folder.
        outcome: How it ended.
        kills_before: Kills by the out-of-memory killer before it started; None: not known.
    """
    ranks = local_ranks(config)
    kills = memory.oom_kills()
    free = {folder: _free_bytes(folder) for folder in config.offload.directory or ()}
    fullest = min(free, key=lambda folder: free[folder] or 0, default="")
    return Evidence(
        ranks=ranks,
        total_steps=config.train.steps,
        torchrun_log=last_lines(folder.torchrun_log),
        torchrun_log_path=folder.torchrun_log,
        rank_logs={rank: last_lines(folder.rank_log(rank)) for rank in ranks},
        rank_log_paths={rank: folder.rank_log(rank) for rank in ranks},
        reports=outcome.reports,
        steps={rank: figures.steps for rank, figures in outcome.figures.items()},
        gave_up=outcome.gave_up,
        exit_code=outcome.exit_code,
        machine=MachineFigures(
            oom_kills=None if kills is None or kills_before is None else kills - kills_before,
            memory_limit_bytes=memory.inspect().limit_bytes,
            memory_peak_bytes=memory.peak_of_cgroup(),
            disk_directory=fullest,
            disk_free_bytes=free.get(fullest),
        ),
    )


def _free_bytes(directory: str) -> int | None:
    try:
        stat = os.statvfs(directory)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize
