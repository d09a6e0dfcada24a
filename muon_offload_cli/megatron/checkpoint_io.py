"""Megatron's torch_dist writer and reader, fed from where the state lies and checked piece by piece.

Megatron's writer (megatron/core/dist_checkpointing/strategies/filesystem_async.py) copies every device tensor
to host memory before it writes the first one, hands its results through a process of their own, and reads
host tensors as it writes them. Here device tensors come one at a time, results stay in the process, and files
are written by a `PieceWriter`. On the way back every range is compared with its seal before it is loaded.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from muon_offload_cli.checkpoints.seal import FileSeal, Seal, hash_piece
from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.storage.piece_writer import PieceWriter, Sources


class Outgoing:
    """The files that this rank writes during one save.

    Args:
        sources: Stores that state is read from.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._writers: list[PieceWriter] = []

    def open(self, path: str, mode: str) -> PieceWriter:
        """Stand for `open` in Megatron's writer, which opens its files this way only.

        Raises:
            OSError: The file cannot be made.
        """
        if mode != "wb":
            raise ValueError(f"a checkpoint file is opened with mode {mode!r}")
        writer = PieceWriter(Path(path), self._sources)
        self._writers.append(writer)
        return writer

    def error(self) -> OSError | None:
        """Return the first error of a file; Megatron turns it into text."""
        return next((writer.error for writer in self._writers if writer.error is not None), None)

    def sealed(self) -> dict[str, FileSeal]:
        """Describe what was written, by file name."""
        return {
            writer.path.name: FileSeal(
                size=sum(length for length, _ in writer.pieces), pieces=tuple(writer.pieces)
            )
            for writer in self._writers
        }

    def replace_in(self, stack: Substitutions) -> None:
        """Let Megatron write through this object until `stack` is closed."""
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from torch.utils import serialization

        writer = filesystem_async.FileSystemWriterAsync
        stack.replace(filesystem_async, "open", self.open)
        stack.replace(writer, "preload_tensors", staticmethod(_one_at_a_time))
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stack.replace(filesystem_async, "get_write_results_queue", lambda *_, **__: results)
        # torch would read every byte once more for a sum of its own that nothing compares.
        stack.replace(serialization.config.save, "compute_crc32", False)


class _OnHost(Sequence[Any]):
    """Write items with their tensors, each copied to the host when it is asked for."""

    def __init__(self, items: Sequence[tuple[Any, torch.Tensor]]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        item, tensor = self._items[index]
        return item, tensor.cpu()

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for item, tensor in self._items:
            yield item, tensor.cpu()


def _one_at_a_time(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Stand for `preload_tensors`, which fills host memory with everything that is to be written."""
    return [
        (file_name, key, (bytes_data, _OnHost(tensor_data)))
        for file_name, key, (bytes_data, tensor_data) in write_buckets
    ]


class Incoming:
    """Compares what a load reads with the seal of the checkpoint.

    Args:
        folder: The checkpoint.
        seal: Its seal; None: sizes alone are compared with what Megatron's metadata promises.
    """

    def __init__(self, folder: Path, seal: Seal | None) -> None:
        self._folder = folder
        self._ranges: dict[str, list[tuple[int, int, str]]] = {}
        for name, file in (seal.files if seal else {}).items():
            offset, ranges = 0, []
            for length, digest in file.pieces:
                ranges.append((offset, length, digest))
                offset += length
            self._ranges[name] = ranges

    def replace_in(self, stack: Substitutions) -> None:
        """Check every range before torch reads it, until `stack` is closed."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        cut = FileSystemReader._slice_file

        def checked(reader: Any, stream: Any, place: Any) -> Any:
            self._check(stream, place.relative_path, place.offset, place.length)
            return cut(reader, stream, place)

        stack.replace(FileSystemReader, "_slice_file", checked)

    def _check(self, stream: Any, name: str, start: int, length: int) -> None:
        end = start + length
        size = stream.seek(0, 2)
        if size < end:
            raise damaged(self._folder / name, f"is truncated: {size} bytes, at least {end} are needed")
        for offset, nbytes, digest in self._ranges.get(name, ()):
            if offset < end and offset + nbytes > start:
                stream.seek(offset)
                if hash_piece(stream.read(nbytes)) != digest:
                    raise damaged(
                        self._folder / name, f"is damaged between bytes {offset} and {offset + nbytes}"
                    )


def damaged(path: Path, how: str) -> UserError:
    """Return the error of a checkpoint file that is not what was saved."""
    return UserError(
        problems=[
            Problem(
                what=f"the checkpoint file {path} {how}.",
                fix="resume=STEP of an earlier one (muon-offload checkpoints DIRECTORY --verify lists them)",
                keys=("resume.source",),
            )
        ]
    )
