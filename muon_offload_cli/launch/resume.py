"""Which checkpoint a run goes on from: a question to directory listings, answered before it starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from muon_offload_cli.checkpoints.listing import Found, at_step, has_optimizer, list_checkpoints, newest
from muon_offload_cli.checkpoints.names import step_of
from muon_offload_cli.config.locations import from_home
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.shapes import other_shapes
from muon_offload_cli.config.vocabulary import vocabulary_size
from muon_offload_cli.errors import Level, Problem, UserError, override, wrong
from muon_offload_cli.launch.claim import demand_names
from muon_offload_cli.machine.filesystem import folder_fault
from muon_offload_cli.units import round_up

_KEY = "resume.source"


def settle_checkpoints(config: Config, base: Path) -> tuple[Config, list[Problem]]:
    """Make checkpoint paths absolute and choose the checkpoint to load.

    Args:
        config: The resolved configuration; not changed.
        base: Folder that relative paths start from.

    Returns:
        The configuration with `resume.source` an absolute checkpoint directory and `resume.step` a step in
        it, or both null; and notes on what was chosen and what was passed over.

    Raises:
        UserError: There is no such checkpoint, it is not complete, it is another model's, or it has not
            what is asked of it.
    """
    saving = config.checkpoint.directory
    if saving is not None:
        config = replace(config, checkpoint=replace(config.checkpoint, directory=str(_usable(saving, base))))
    source = "none" if config.resume.source is None else config.resume.source
    if source == "none":
        _demand_free(config, source, None)
        return replace(config, resume=replace(config.resume, source=None, step=None)), []
    directory, found, notes = _choose(config, source, base)
    _demand_free(config, source, directory)
    if found is None:
        return replace(config, resume=replace(config.resume, source=None, step=None)), notes
    _demand_fit(config, found)
    _demand_last(config, source, found)
    kind = "its weights alone" if config.resume.weights_only else "it"
    notes.append(
        Problem(
            what=f"resume={source} takes step {found.step} of {directory} and goes on from {kind}.",
            keys=(_KEY,),
            level=Level.NOTE,
        )
    )
    config, padding = _same_vocabulary(config, found)
    notes += padding
    settled = replace(config.resume, source=str(directory), step=found.step)
    return replace(config, resume=settled), notes


def _same_vocabulary(config: Config, found: Found) -> tuple[Config, list[Problem]]:
    """Pad the vocabulary as in the checkpoint: padding follows the parallel sizes, and is in the softmax."""
    if found.seal is None or min(config.parallel.tp, config.model.make_vocab_size_divisible_by) < 1:
        return config, []
    saved, tp, divisor = (
        found.seal.padded_vocabulary,
        config.parallel.tp,
        config.model.make_vocab_size_divisible_by,
    )
    vocabulary = vocabulary_size(config)
    if round_up(vocabulary, divisor * tp) == saved or saved % tp or vocabulary > saved:
        return config, []
    note = Problem(
        what=f"the checkpoint's vocabulary is padded to {saved}: "
        f"model.make_vocab_size_divisible_by={saved // tp} takes the place of {divisor}.",
        keys=("model.make_vocab_size_divisible_by",),
        level=Level.NOTE,
    )
    return replace(config, model=replace(config.model, make_vocab_size_divisible_by=saved // tp)), [note]


def _usable(directory: str, base: Path) -> Path:
    path = Path(os.path.normpath(base / from_home(directory)))
    if step_of(path) is not None:
        raise wrong(
            f"checkpoint.directory={directory} is a checkpoint itself: its folder is meant.",
            override("checkpoint.directory", path.parent),
            "checkpoint.directory",
        )
    try:
        nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError as error:
        raise wrong(
            f"checkpoint.directory={directory} cannot be looked at: {error.strerror}.",
            "checkpoint.directory=/a/folder/that/you/may/write",
            "checkpoint.directory",
        ) from error
    if not nearest.is_dir():
        raise wrong(
            f"checkpoint.directory={directory}: {nearest} is a file.", "checkpoint.directory=/a/folder"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise wrong(
            f"checkpoint.directory={directory}: you may not write in {nearest}.",
            "checkpoint.directory=/a/folder/that/you/may/write",
            "checkpoint.directory",
        )
    demand_names(path)
    return path


def _demand_free(config: Config, source: str, directory: Path | None) -> None:
    """Refuse to save among checkpoints that the run does not go on from: it would replace and delete them.

    Args:
        config: With an absolute `checkpoint.directory`.
        source: `resume.source`.
        directory: What it goes on from, or takes weights from; None: nothing.
    """
    if config.checkpoint.directory is None:
        return
    own = Path(config.checkpoint.directory)
    goes_on = directory is not None and not config.resume.weights_only
    if goes_on and directory is not None and directory.resolve() == own.resolve():
        return
    # What an interrupted first save left is in nobody's way.
    standing = [each for each in _list(own, source) if not each.growing]
    if not standing:
        return
    fix = "checkpoint.directory=/another/folder"
    if newest(standing) is not None:
        weights = " resume.weights_only=false" if config.resume.weights_only else ""
        fix = f"resume=auto{weights}; or {fix}"
    does = "goes on from others" if goes_on else "starts anew"
    raise wrong(
        f"checkpoint.directory={own} holds checkpoints (the last of step {standing[-1].step}), and a run "
        f"with resume={source} {does}: it would replace and delete them.",
        fix,
        _KEY,
        "checkpoint.directory",
    )


def _demand_last(config: Config, source: str, found: Found) -> None:
    """Refuse to go back in a folder that keeps later steps: ``resume=auto`` would go on from those next."""
    own = config.checkpoint.directory
    if own is None or config.resume.weights_only or found.folder.parent.resolve() != Path(own).resolve():
        return
    later = [each.step for each in _list(Path(own), source) if each.complete and each.step > found.step]
    if later:
        branch = f"{own}_from_{found.step}"
        raise wrong(
            f"resume={source} takes step {found.step}, and checkpoint.directory={own} keeps later ones "
            f"({', '.join(map(str, later))}): resume=auto would go on from those, not from this run.",
            f"{override('checkpoint.directory', branch)} {override('resume', found.folder)}",
            _KEY,
            "checkpoint.directory",
        )


def _choose(config: Config, source: str, base: Path) -> tuple[Path, Found | None, list[Problem]]:
    own = Path(config.checkpoint.directory or base)
    if source == "auto":
        found, notes = _newest(own, source, _list(own, source))
        if found is None:
            notes.append(
                Problem(
                    what=f"resume=auto: {own} holds no checkpoint, so the run starts anew.",
                    keys=(_KEY,),
                    level=Level.NOTE,
                )
            )
        return own, found, notes
    if source.isdecimal():
        return own, _exactly(own, int(source), source), []
    if not source:
        raise wrong("resume= is empty: it names no checkpoint.", _likely(config), _KEY)
    path = Path(os.path.normpath(base / from_home(source)))
    if fault := folder_fault(path):
        known = "" if "/" in source else "it is none of auto, none and a step's number, and "
        raise wrong(f"resume={source}: {known}{fault}.", _likely(config), _KEY)
    step = step_of(path)
    if step is not None:
        return path.parent, _exactly(path.parent, step, source), []
    if config.resume.step is not None:
        return path, _exactly(path, config.resume.step, source), []
    found, notes = _newest(path, source, _list(path, source))
    if found is None:
        raise wrong(f"resume={source}: {path} holds no checkpoint.", "resume=none", _KEY)
    return path, found, notes


def _likely(config: Config) -> str:
    """Return what a word that names no checkpoint was probably to be."""
    return "resume=auto" if config.checkpoint.directory is not None else "resume=/path/to/checkpoints"


def _list(directory: Path, source: str) -> list[Found]:
    with _readable(directory, source):
        return list_checkpoints(directory)


@contextlib.contextmanager
def _readable(directory: Path, source: str) -> Iterator[None]:
    """Tell of a folder that this user may not look into."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise wrong(
            f"resume={source}: {directory} cannot be read: {reason}.", "resume=/path/to/checkpoints", _KEY
        ) from error


def _newest(directory: Path, source: str, found: list[Found]) -> tuple[Found | None, list[Problem]]:
    best = newest(found)
    passed = [each for each in found if not each.complete and (best is None or each.step > best.step)]
    standing = [each for each in passed if not each.growing]
    if best is None and standing:
        told = "; ".join(f"step {each.step}: {each.fault}" for each in standing)
        raise wrong(
            f"resume={source}: no checkpoint in {directory} is complete ({told}).",
            "checkpoint.directory=/another/folder" if source == "auto" else "resume=/path/to/checkpoints",
            _KEY,
        )
    notes = [
        Problem(
            what=f"resume={source} passes over step {each.step} in {each.folder}: {each.fault}.",
            keys=(_KEY,),
            level=Level.WARNING,
        )
        for each in passed
    ]
    return best, notes


def _exactly(directory: Path, step: int, source: str) -> Found:
    with _readable(directory, source):
        found = at_step(directory, step)
    if found is not None and found.complete:
        return found
    fault = (
        f"step {step} in {directory} is not complete: {found.fault}"
        if found
        else (f"there is no step {step} in {directory}")
    )
    standing = [each for each in _list(directory, source) if not each.growing]
    there = [each.step for each in standing if each.complete]
    listed = f" Complete steps: {', '.join(map(str, there))}." if there else " None is complete."
    fix = "checkpoint.directory=/another/folder resume=none" if standing else "resume=none"
    if there:
        fix = override("resume", directory if "/" in source else str(there[-1]))
    raise wrong(f"resume={source}: {fault}.{listed}", fix, _KEY)


def _demand_fit(config: Config, found: Found) -> None:
    problems = list(_of_another_model(config, found))
    if config.resume.weights_only:
        if problems:
            raise UserError(problems=problems)
        return
    with _readable(found.folder, str(config.resume.source)):
        whole = has_optimizer(found)
    if not whole:
        problems.append(
            Problem(
                what=f"step {found.step} in {found.folder.parent} was saved without optimizer state "
                "(checkpoint.optimizer=false): there is none to go on with.",
                fix=override("resume", found.folder)
                + " resume.weights_only=true, with another checkpoint.directory",
                keys=(_KEY, "resume.weights_only"),
            )
        )
    if found.step >= config.train.steps:
        problems.append(
            Problem(
                what=f"step {found.step} in {found.folder.parent} is "
                f"{'the end of' if found.step == config.train.steps else 'beyond'} "
                f"train.steps={config.train.steps}: nothing is left to train.",
                fix=f"train.steps={found.step + config.train.steps}",
                keys=("train.steps", _KEY),
            )
        )
    if problems:
        raise UserError(problems=problems)


def _of_another_model(config: Config, found: Found) -> Iterator[Problem]:
    for key, (saved, present) in other_shapes(config, found.seal.model if found.seal else {}).items():
        yield Problem(
            what=f"step {found.step} in {found.folder.parent} was saved with {key}={saved}, and this run has "
            f"{key}={present}: its tensors are another model's.",
            fix=f"{key}={saved}",
            keys=(key, _KEY),
        )
