"""Saving and loading in Megatron's training loop: each save is sealed, each load is checked."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from muon_offload_cli.checkpoints.keeping import delete_older, make_room, put_in_place
from muon_offload_cli.checkpoints.listing import list_checkpoints
from muon_offload_cli.checkpoints.names import SAVING, step_folder
from muon_offload_cli.checkpoints.seal import FileSeal, Seal, seal_file
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.shapes import shapes_of
from muon_offload_cli.errors import UserError, does_not_fit, override, wrong
from muon_offload_cli.machine.resident import resident_growth
from muon_offload_cli.megatron.adam_state import collect_one_at_a_time
from muon_offload_cli.megatron.checkpoint_io import Incoming, Outgoing
from muon_offload_cli.megatron.load_differences import demand_same_tensors, first_user_error
from muon_offload_cli.megatron.observer import Observer
from muon_offload_cli.megatron.own_settings import keep_own_settings
from muon_offload_cli.megatron.regrouped import load_into_present_groups
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.offload.watched import Watched
from muon_offload_cli.storage.sources import Sources
from muon_offload_cli.storage.store import describe_errno
from muon_offload_cli.version import VERSION

KEY = "checkpoint.directory"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# torch writes `common.pt` in C++, and does not say what the system told it.
_TORCH_COULD_NOT_WRITE = re.compile(r"iostream error|inline_container|PytorchStreamWriter")


class Checkpoints:
    """Stands between Megatron's training loop and its checkpoints on one rank.

    Args:
        config: Resolved; `resume.source` and `resume.step` name one checkpoint or none.
        observer: Told of every save and load.
    """

    def __init__(self, config: Config, observer: Observer) -> None:
        self._config = config
        self._observer = observer
        self._offloaders: list[Watched] = []

    def built(self, optimizer: Any) -> None:
        """Take note of a Muon optimizer whose state was offloaded."""
        self._offloaders.append(optimizer.offloader)

    def watch(self, stack: Substitutions) -> None:
        """Take part in saves, loads and early ends until `stack` is closed."""
        from megatron.training import training

        save, load, decide = (
            training.save_checkpoint,
            training.load_checkpoint,
            training.checkpoint_and_decide_exit,
        )

        def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> None:
            self._save(iteration, lambda: save(iteration, *args, **kwargs))

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            return self._load(lambda: load(*args, **kwargs))

        def checkpoint_and_decide_exit(
            model: Any, optimizer: Any, scheduler: Any, iteration: int, *args: Any, **kwargs: Any
        ) -> bool:
            ends = bool(decide(model, optimizer, scheduler, iteration, *args, **kwargs))
            if ends and self._config.checkpoint.directory is not None:
                self._observer.stopped(iteration)
            return ends

        stack.replace(training, "save_checkpoint", save_checkpoint)
        stack.replace(training, "load_checkpoint", load_checkpoint)
        stack.replace(training, "checkpoint_and_decide_exit", checkpoint_and_decide_exit)

    def _save(self, step: int, save: Callable[[], None]) -> None:
        """Let Megatron write to a folder aside, then move it to its place and seal it.

        Raises:
            UserError: The checkpoint's file system is full, or reports another error.
        """
        from megatron.training import get_args

        args = get_args()
        directory = Path(args.save)
        with resident_growth() as growth:
            began = time.perf_counter()
            self._settle()
            flushed = time.perf_counter()
            growing = self._alone(lambda: make_room(directory))
            with self._sources() as sources, Substitutions() as stack:
                outgoing = Outgoing(sources)
                outgoing.replace_in(stack)
                collect_one_at_a_time(stack)
                _stop_at_first_error(stack, outgoing, directory)
                stack.replace(args, "save", str(growing))
                with small_files_told(directory):
                    save()
            files: dict[str, FileSeal] = {}
            for part in _gathered(outgoing.sealed()):
                files.update(part)
            nbytes = self._alone(lambda: self._finish(directory, step, files))
        self._observer.saved(
            step,
            flush_s=flushed - began,
            write_s=time.perf_counter() - flushed,
            nbytes=nbytes,
            grown=growth.nbytes,
        )

    def _sources(self) -> Sources:
        return Sources([store for each in self._offloaders for store in each.stores.values()])

    def _finish(self, directory: Path, step: int, files: dict[str, FileSeal]) -> int:
        folder = step_folder(directory / SAVING, step)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in files:
                files[str(path.relative_to(folder))] = seal_file(path)
        seal = self._seal(step, files)
        put_in_place(directory, seal)
        if self._config.checkpoint.keep is not None:
            for gone in delete_older(directory, step, self._config.checkpoint.keep):
                print(f"deleted {gone}: checkpoint.keep={self._config.checkpoint.keep}", flush=True)
        return seal.nbytes

    def _seal(self, step: int, files: dict[str, FileSeal]) -> Seal:
        from megatron.training import get_args

        from muon_offload_cli.megatron.release import megatron_release

        args, offload = get_args(), self._config.offload
        return Seal(
            step=step,
            saved_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            optimizer=self._config.checkpoint.optimizer,
            world_size=args.world_size,
            layout={
                "tp": args.tensor_model_parallel_size,
                "pp": args.pipeline_model_parallel_size,
                "cp": args.context_parallel_size,
                "ep": args.expert_model_parallel_size,
                "etp": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
                "dp": args.data_parallel_size,
            },
            padded_vocabulary=args.padded_vocab_size,
            engine=offload.engine.name,
            chunk_mb=offload.chunk_mb,
            versions={
                "muon_offload": VERSION,
                "megatron_core": megatron_release(),
                "torch": torch.__version__,
            },
            model=shapes_of(self._config),
            files=files,
        )

    def _alone[T](self, action: Callable[[], T]) -> T:
        """Do something on rank 0 while the others wait; all get its result, or its error as a user's.

        Raises:
            UserError: It failed on rank 0.
        """
        told: list[Any] = [None, None]
        if torch.distributed.get_rank() == 0:
            try:
                told = [action(), None]
            except OSError as error:
                told = [None, _refused(Path(str(self._config.checkpoint.directory)), error).problems]
        torch.distributed.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise UserError(problems=told[1])
        result: T = told[0]
        return result

    def _load(self, load: Callable[[], Any]) -> Any:
        """Let Megatron load; raise what a person can help as a `UserError` that names file or tensor."""
        resume = self._config.resume
        if resume.source is None or resume.step is None:
            return load()
        began = time.perf_counter()
        folder = step_folder(Path(resume.source), resume.step)
        if len(chosen := set(_gathered(resume.step))) > 1:
            # Each node's launcher chooses, and a run before this one may just have ended its last save.
            raise wrong(
                f"resume={resume.source} was at different steps when the nodes looked: {sorted(chosen)}.",
                "start all nodes again, or name a step: resume.step=N",
                "resume.source",
            )
        with resident_growth() as growth, self._sources() as sources, Substitutions() as stack:
            for offloader in self._offloaders:
                # Masters were born shortly before: what belongs elsewhere is read while they are written.
                stack.enter_context(offloader.loading())
            Incoming(folder, Seal.read(folder), sources, self._settle).replace_in(stack)
            collect_one_at_a_time(stack)
            demand_same_tensors(stack, folder)
            keep_own_settings(stack)
            load_into_present_groups(stack)
            try:
                with first_user_error():
                    loaded = load()
            except SystemExit as leaving:
                # Megatron leaves without an error code where a checkpoint lacks something.
                raise RuntimeError(f"Megatron gave up loading {folder}; the lines above say why") from leaving
        for offloader in self._offloaders:
            if offloader.settings.engine == "disk":
                offloader.drop_cache()
        self._observer.loaded(resume.step, time.perf_counter() - began, growth.nbytes)
        return loaded

    def _settle(self) -> None:
        for offloader in self._offloaders:
            offloader.synchronize()


def _gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def _stop_at_first_error(stack: Substitutions, outgoing: Outgoing, directory: Path) -> None:
    """Raise a file's own error on the rank that met it; Megatron would tell rank 0 a text about it."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data_multithread

    def write_or_raise(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        error = outgoing.error()
        if error is not None:
            raise _refused(directory, error) from error

    stack.replace(FileSystemWriterAsync, "write_preloaded_data_multithread", staticmethod(write_or_raise))


@contextlib.contextmanager
def small_files_told(directory: Path) -> Iterator[None]:
    """Raise what Megatron meets with folders and files that it writes itself, as a `UserError`."""
    try:
        yield
    except OSError as error:
        raise _refused(directory, error) from error
    except RuntimeError as error:
        if not _TORCH_COULD_NOT_WRITE.search(str(error)):
            raise
        reason = f"torch's writer gave up, {str(error).splitlines()[0]}"
        raise _cannot_save(directory, None, reason) from error


def _refused(directory: Path, error: OSError) -> UserError:
    return _cannot_save(directory, error, f"{describe_errno(error)}: {error.filename or directory}")


def _cannot_save(directory: Path, error: OSError | None, reason: str) -> UserError:
    """Tell a save that failed, with what mends it and what is left to go on from.

    Args:
        directory: Where checkpoints go.
        error: What the system said; None: not known, as of torch's writer, and nearly always a full drive.
        reason: That, or what is known instead.
    """
    try:
        earlier = any(found.complete for found in list_checkpoints(directory))
    except OSError:
        earlier = False
    if error is None or error.errno in _FULL:
        fix = f"{KEY}=/on/a/larger/drive"
        if earlier:
            fix += (
                f" {override('resume', directory)}; or free space there, then resume=auto checkpoint.keep=1"
            )
    else:
        fix = f"{KEY}=/path/you/can/write" + (f" {override('resume', directory)}" if earlier else "")
    left = "Earlier checkpoints are whole." if earlier else "There is no earlier checkpoint."
    return does_not_fit(f"{KEY}={directory} cannot be written: {reason}. {left}", fix, KEY)
