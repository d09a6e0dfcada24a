"""The run folder: where the launcher and the ranks write, and how a new one is made."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from muon_offload_cli.config.locations import default_runs_directory, from_home
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.yaml_files import save_config
from muon_offload_cli.errors import UserError, does_not_fit, override, wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """Names inside one run's folder. The worker knows the same layout by its own constants.

    Attributes:
        root: Absolute path of the folder.
    """

    root: Path

    @property
    def resolved(self) -> Path:
        """The composed configuration, the only one that a rank reads."""
        return self.root / "resolved.yaml"

    @property
    def script(self) -> Path:
        """The bash script that the launcher itself runs."""
        return self.root / "run.sh"

    def write_script(self, text: str) -> None:
        """Write `script`, executable; paths in it become the bytes that they are, whatever the locale."""
        self.script.write_text(text, encoding="utf-8", errors="surrogateescape")
        self.script.chmod(0o755)

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """Folder of one JSON-lines file a rank."""
        return self.root / "metrics"

    @property
    def reports(self) -> Path:
        """Folder of one JSON file a rank."""
        return self.root / "reports"

    @property
    def summary(self) -> Path:
        """The verdict as JSON, written by the launcher at the end."""
        return self.root / "summary.json"

    @property
    def torchrun_log(self) -> Path:
        """Torchrun's own output, and that of ranks which died before they opened their log."""
        return self.logs / "torchrun.log"

    def rank_log(self, rank: int) -> Path:
        """Standard output and error of one rank."""
        return self.logs / f"rank_{rank}.log"

    def rank_metrics(self, rank: int) -> Path:
        """One line of figures a step of one rank."""
        return self.metrics / f"rank_{rank}.jsonl"

    def rank_report(self, rank: int) -> Path:
        """What one rank holds and how it ended."""
        return self.reports / f"rank_{rank}.json"


def local_ranks(config: Config) -> Sequence[int]:
    """Return the global ranks that this node starts, in order."""
    launcher = config.launcher
    first = launcher.node_rank * launcher.ranks_per_node
    return range(first, first + launcher.ranks_per_node)


def planned_folder(config: Config, *, now: datetime, base: Path) -> RunFolder:
    """Say where a run's folder would be, without making or checking it.

    Args:
        config: The resolved configuration.
        now: Local time, which names the folder when `run.directory` does not.
        base: Absolute folder that relative names start from (the working directory).
    """
    if config.run.directory is not None:
        root = base / from_home(config.run.directory)
        if config.launcher.nodes > 1:
            # Nodes usually share a file system, and each launcher needs a folder of its own.
            root = root / f"node_{config.launcher.node_rank}"
    else:
        root = base / default_runs_directory(config.recipe) / now.strftime("%Y%m%d-%H%M%S")
    return RunFolder(root=Path(os.path.normpath(root)))


def create_folder(config: Config, *, now: datetime, base: Path) -> RunFolder:
    """Make the run folder with its subfolders and return it.

    A folder named by time gets ``-2``, ``-3`` and so on when another run took the same second.

    Raises:
        UserError: `run.directory` is not empty, is no folder, or cannot be made.
    """
    folder = planned_folder(config, now=now, base=base)
    try:
        folder = _claim_fresh(folder) if config.run.directory is None else _claim_named(folder)
    except OSError as error:
        raise _not_made(config, folder, error) from error
    try:
        for sub in (folder.logs, folder.metrics, folder.reports):
            sub.mkdir()
    except OSError as error:
        _empty(folder)
        raise _not_made(config, folder, error) from error
    return folder


def begin_folder(
    config: Config, *, now: datetime, base: Path, script: Callable[[RunFolder], str]
) -> RunFolder:
    """Make the run folder with the configuration and the script of the run.

    Args:
        config: The resolved configuration.
        now: As for `planned_folder`.
        base: As for `planned_folder`.
        script: Gives the text of the script.

    Raises:
        UserError: As `create_folder`, or the folder takes no more; nothing is left in it.
    """
    folder = create_folder(config, now=now, base=base)
    try:
        save_config(config, folder.resolved)
        folder.write_script(script(folder))
    except OSError as error:
        _empty(folder)
        raise _not_made(config, folder, error) from error
    return folder


def _empty(folder: RunFolder) -> None:
    """Remove what was made in a folder, as far as that can be done."""
    for made in (folder.logs, folder.metrics, folder.reports):
        shutil.rmtree(made, ignore_errors=True)
    for file in (folder.script, *folder.root.glob(f"{folder.resolved.name}*")):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _not_made(config: Config, folder: RunFolder, error: OSError) -> UserError:
    asked = config.run.directory
    place = f"the run folder {folder.root} (run.directory)" if asked is None else f"run.directory={asked}"
    return does_not_fit(
        f"{place} cannot be made: {error.strerror}: {error.filename or folder.root}.",
        "run.directory=/a/folder/that/you/may/write",
        "run.directory",
    )


def _claim_named(folder: RunFolder) -> RunFolder:
    try:
        folder.root.mkdir(parents=True)
    except FileExistsError:
        _demand_empty(folder)
    return folder


def demand_own(config: Config, *, base: Path) -> None:
    """Refuse a `run.directory` that another run has taken, before anything is made there.

    Raises:
        UserError: It is not empty, or is no folder.
    """
    if config.run.directory is None:
        return
    folder = planned_folder(config, now=datetime.min, base=base)
    # Whether it can be made or read is for the rules to say.
    with contextlib.suppress(OSError, ValueError):
        if folder.root.exists():
            _demand_empty(folder)


def _demand_empty(folder: RunFolder) -> None:
    if not folder.root.is_dir():
        raise _taken(folder, "is a file")
    if any(folder.root.iterdir()):
        raise _taken(folder, "is not empty")


def _taken(folder: RunFolder, how: str) -> UserError:
    return wrong(
        f"run.directory={folder.root} {how}; a run needs a folder of its own.",
        override("run.directory", f"{folder.root}-2"),
        "run.directory",
    )


def _claim_fresh(folder: RunFolder) -> RunFolder:
    folder.root.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    root = folder.root
    while True:
        try:
            root.mkdir()
        except FileExistsError:
            number += 1
            root = folder.root.with_name(f"{folder.root.name}-{number}")
        else:
            return RunFolder(root=root)
