"""Megatron's torch_dist writer and reader, fed from where the state lies and checked piece by piece.

Megatron's writer (megatron/core/dist_checkpointing/strategies/filesystem_async.py) copies every device tensor
to host memory before it writes the first one, hands its results through a process of their own, and reads
host tensors as it writes them. Here device tensors come one at a time, results stay in the process, and files
are written by a `PieceWriter`. On the way back files are read by a `PieceReader`.
"""

from __future__ import annotations

import io
import pickle
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from muon_offload_cli.checkpoints.listing import content_fault, list_checkpoints, newest
from muon_offload_cli.checkpoints.names import TENSORS, step_of
from muon_offload_cli.checkpoints.seal import FileSeal, Seal
from muon_offload_cli.errors import UserError, override, wrong
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.storage.piece_reader import DamagedFile, FileRange, PieceReader
from muon_offload_cli.storage.piece_writer import PieceWriter
from muon_offload_cli.storage.placing import Placing
from muon_offload_cli.storage.sources import Sources
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import MIB

AHEAD_BYTES = 512 * MIB
"""The largest tensor that is copied or read while another one is under way: host memory holds both."""

_NO_TENSOR = (
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)
"""What torch raises over bytes that are no archive of a tensor."""


class Outgoing:
    """The files that this rank writes during one save.

    Args:
        sources: Stores that state is read from.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._writers: list[PieceWriter] = []
        self._unmade: list[OSError] = []

    def open(self, path: str, mode: str) -> PieceWriter:
        """Stand for `open` in Megatron's writer, which opens its files this way only.

        Raises:
            OSError: The file cannot be made.
        """
        if mode != "wb":
            raise ValueError(f"a checkpoint file is opened with mode {mode!r}")
        try:
            writer = PieceWriter(Path(path), self._sources)
        except OSError as error:
            self._unmade.append(error)
            raise
        self._writers.append(writer)
        return writer

    def error(self) -> OSError | None:
        """Return the first error of a file; Megatron turns it into text."""
        errors = [*self._unmade, *(writer.error for writer in self._writers)]
        return next((error for error in errors if error is not None), None)

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
    """Write items with their tensors, each copied to the host while the one before it is written."""

    def __init__(self, items: Sequence[tuple[Any, torch.Tensor]]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        item, tensor = self._items[index]
        return item, tensor.cpu()

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        with ThreadPoolExecutor(1, thread_name_prefix="muon-save-copy") as ahead:
            coming: list[Any] = []
            for index, (item, tensor) in enumerate(self._items):
                copied = coming.pop().result() if coming else tensor.cpu()
                coming = [
                    ahead.submit(following.cpu)
                    for _, following in self._items[index + 1 : index + 2]
                    if following.nbytes <= AHEAD_BYTES
                ]
                yield item, copied


def _one_at_a_time(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Stand for `preload_tensors`, which fills host memory with everything that is to be written."""
    return [
        (file_name, key, (bytes_data, _OnHost(tensor_data)))
        for file_name, key, (bytes_data, tensor_data) in write_buckets
    ]


class Incoming:
    """Stands for torch's reader of checkpoint files: all that is read is compared with the seal first.

    Tensors are read one ahead of the one that is put in its place. What belongs into a direct store goes
    there with direct I/O, behind the next tensors. What belongs into no store is read first, while the
    stores are still being written.

    Args:
        folder: The checkpoint.
        seal: Its seal; None: sizes alone are compared with what Megatron's metadata promises.
        sources: Stores that state is loaded into.
        settle: Called before anything is put there: waits until nobody else writes there.
    """

    def __init__(self, folder: Path, seal: Seal | None, sources: Sources, settle: Callable[[], None]) -> None:
        self._folder = folder
        self._seal = seal
        self._files = seal.files if seal else {}
        self._sources = sources
        self._settle = settle

    def replace_in(self, stack: Substitutions) -> None:
        """Read through this object until `stack` is closed.

        Raises:
            UserError: A file that Megatron reads itself is not what was sealed.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        if self._seal is not None and (fault := content_fault(self._folder, self._seal, but=TENSORS)):
            raise damaged(self._folder, f"{self._folder}/{fault}")

        def read_data(reader: Any, plan: Any, planner: Any) -> Any:
            try:
                with closing(Placing()) as placing:
                    self._read(reader, plan, planner, placing)
                    placing.finish()
            except DamagedFile as error:
                raise damaged(self._folder, str(error)) from error
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done

        stack.replace(FileSystemReader, "read_data", read_data)

    def _read(self, reader: Any, plan: Any, planner: Any, placing: Placing) -> None:
        from torch.distributed.checkpoint.planner import LoadItemType

        places = {id(item): reader.storage_data[item.storage_index] for item in plan.items}
        stored = {
            id(item)
            for item in plan.items
            if item.type != LoadItemType.BYTE_IO and self._place(planner.lookup_tensor(item.dest_index))
        }

        def order(item: Any) -> tuple[bool, str, int]:
            place = places[id(item)]
            return id(item) in stored, place.relative_path, place.offset

        items = sorted(plan.items, key=order)
        with ExitStack() as stack:
            last = stack.enter_context(ExitStack())
            ahead = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="muon-load"))
            files: dict[str, PieceReader] = {}

            def read(item: Any) -> Any:
                place = places[id(item)]
                name = place.relative_path
                if name not in files:
                    last.close()
                    files.clear()
                    seal = self._files.get(name)
                    files[name] = PieceReader(
                        self._folder / name, seal.pieces if seal else None, self._sources
                    )
                    last.callback(files[name].close)
                part = FileRange(files[name], place.offset, place.length)
                stream = reader.transforms.transform_load_stream(
                    item, place.transform_descriptors or (), part
                )
                try:
                    if item.type == LoadItemType.BYTE_IO:
                        return io.BytesIO(stream.read())
                    return torch.load(stream, map_location="cpu", weights_only=True)
                except _NO_TENSOR as error:
                    if name in self._files:
                        raise
                    raise DamagedFile(files[name].path, f"holds no tensor at byte {place.offset}") from error
                finally:
                    # torch reads archives in C++, and tells of what a file raised there something of its own.
                    if part.fault is not None:
                        raise part.fault

            coming: list[Any] = []
            for index, item in enumerate(items):
                loaded = coming.pop().result() if coming else read(item)
                following = items[index + 1 : index + 2]
                coming = [
                    ahead.submit(read, each) for each in following if places[id(each)].length <= AHEAD_BYTES
                ]
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, loaded)
                    continue
                if index == len(items) - len(stored):
                    self._settle()
                target = planner.resolve_tensor(item).detach()
                self._put(target, _narrowed(loaded, item), placing)
                planner.commit_tensor(item, target)

    def _put(self, target: torch.Tensor, tensor: torch.Tensor, placing: Placing) -> None:
        if target.size() != tensor.size():
            raise ValueError(f"a tensor of {list(tensor.size())} is no {list(target.size())}")
        found = self._place(target)
        if found is not None and found[0].direct:
            if target.is_contiguous() and target.dtype == tensor.dtype:
                data = tensor.contiguous().flatten().view(torch.uint8).numpy()
                placing.put(*found, memoryview(data))
                return
            # Through the mapping: no direct write may be under way in a page that it faults in.
            placing.drain()
        target.copy_(tensor)

    def _place(self, tensor: torch.Tensor) -> tuple[Store, int] | None:
        """Return the store that a tensor lies in and the offset there; None: in none."""
        address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.numel() else 0
        return self._sources.find_address(address, tensor.element_size())


def _narrowed(tensor: torch.Tensor, item: Any) -> torch.Tensor:
    from torch.distributed._shard._utils import narrow_tensor_by_index

    narrowed: torch.Tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
    return narrowed


def damaged(folder: Path, told: str) -> UserError:
    """Return the error of a checkpoint that is not what was saved.

    Args:
        folder: The checkpoint.
        told: The path of its file, and what is wrong with it.
    """
    step = step_of(folder) or 0
    try:
        earlier = newest([each for each in list_checkpoints(folder.parent) if each.step < step])
    except OSError:
        earlier = None
    fix = override("resume", earlier.folder) if earlier else "resume=/path/of/another/checkpoint"
    return wrong(f"the checkpoint file {told}.", fix, "resume.source")
