"""What rules may know of the machine, gathered beforehand so that the rules themselves stay pure.

Every fact has a value for "not known", and a rule that needs an unknown fact finds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muon_offload_cli.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryFacts:
    """The offload directory as it will be used.

    Attributes:
        path: The directory that is meant, which may not exist yet.
        nearest: It, or its nearest parent that exists, symlinks resolved.
        exists: `path` itself exists already.
        is_folder: `nearest` is a folder and not a file.
        mount_point: Root of the filesystem that holds `nearest`.
        kind: Filesystem type: ``ext4``, ``tmpfs``, ...
        is_memory: The filesystem lives in memory.
        is_network: The filesystem is reached over a network, or through FUSE.
        free_bytes: Bytes that this user may still write.
        writable: This user may create entries in `nearest`.
        direct_io: O_DIRECT works there; None: not tried.
    """

    path: Path
    nearest: Path
    exists: bool = True
    is_folder: bool = True
    mount_point: Path = Path("/")
    kind: str = "ext4"
    is_memory: bool = False
    is_network: bool = False
    free_bytes: int | None = None
    writable: bool = True
    direct_io: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """A file that the run reads. `num_bytes` is None if it does not exist or is no file."""

    num_bytes: int | None
    readable: bool = True
    is_folder: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Facts of the machine at hand; the empty instance knows nothing.

    Attributes:
        working_directory: Folder that the command was started in.
        directory: The offload directory; None if no engine uses one or it could not be chosen.
        files: Data files of the config by path as given.
        needed_bytes: Bytes that all ranks of this node will reserve in the offload directory.
        cuda_available: Whether torch sees a GPU.
        num_gpus: GPUs that torch sees.
        megatron_version: Version of the Megatron that would train.
        megatron_flags: Flags of its parser, as attribute names with underscores.
        problems: What gathering itself found: no Megatron, a stub package, no place to default to.
    """

    working_directory: Path | None = None
    directory: DirectoryFacts | None = None
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    needed_bytes: int | None = None
    cuda_available: bool | None = None
    num_gpus: int | None = None
    megatron_version: str | None = None
    megatron_flags: frozenset[str] | None = None
    problems: tuple[Problem, ...] = ()
