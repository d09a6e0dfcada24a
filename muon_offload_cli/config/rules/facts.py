"""What rules may know of the machine, gathered beforehand so that the rules themselves stay pure.

Every fact has a value for "not known", and a rule that needs an unknown fact finds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muon_offload_cli.checkpoints.room import Coming
from muon_offload_cli.errors import Problem
from muon_offload_cli.machine.limits import NO_LIMITS, ProcessLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryFacts:
    """One folder as it will be used, for state or for something else that a run writes.

    Attributes:
        path: The directory that is meant, which may not exist yet.
        nearest: It, or its nearest parent that exists, symlinks resolved.
        exists: `path` itself exists already.
        is_folder: `nearest` is a folder and not a file.
        mount_point: Root of the filesystem that holds `nearest`.
        device: Number of that filesystem, the same wherever it is mounted.
        kind: Filesystem type: ``ext4``, ``tmpfs``, ...
        is_memory: The filesystem lives in memory.
        is_network: The filesystem is reached over a network, or through FUSE.
        free_bytes: Bytes that this user may still write.
        writable: This user may create entries in `nearest`.
        read_only: The filesystem is mounted so that nobody may.
        dangling: A link on the way to `path` leads here, where nothing is; None: there is no such link.
        direct_io: O_DIRECT works there; None: not tried.
        write_error: What a trial of writing and reading there ran into; empty: nothing; None: not tried.
        bytes_per_s: What `bench-disk` measured of it, reading and writing together; None: nothing.
    """

    path: Path
    nearest: Path
    exists: bool = True
    is_folder: bool = True
    mount_point: Path = Path("/")
    device: int = 0
    kind: str = "ext4"
    is_memory: bool = False
    is_network: bool = False
    free_bytes: int | None = None
    writable: bool = True
    read_only: bool = False
    dangling: Path | None = None
    direct_io: bool | None = None
    write_error: str | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """A file that the run reads.

    Attributes:
        num_bytes: Its size; None if it does not exist or is no file.
        readable: This user may read it.
        is_folder: It is a folder.
        not_python: For a script, why Python cannot run it, as the end of a sentence; empty if it can.
    """

    num_bytes: int | None
    readable: bool = True
    is_folder: bool = False
    not_python: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedFacts:
    """The folder of `model.from_hf`, and what is installed to read it.

    Attributes:
        weight_files: Files of weights (safetensors) in it.
        missing: Files that its index of weights names and that are not there.
        tokenizer: It holds a tokenizer.
        bridge: Megatron-Bridge is installed.
        transformers: The package transformers is installed.
    """

    weight_files: int = 1
    missing: tuple[str, ...] = ()
    tokenizer: bool = True
    bridge: bool = True
    transformers: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterFacts:
    """A matrix that Muon steps, as one rank holds it, with the bytes of its momentum and master weight."""

    name: str
    shape: tuple[int, ...]
    state_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFacts:
    """What the plan of the run says.

    Attributes:
        directory_bytes: Bytes that all ranks of this node will reserve in each offload directory, in the
            order of `offload.directory`; empty: not known.
        host_bytes: Bytes of host memory that they hold for good, staging rings included.
        staging_bytes: Bytes of all their staging rings.
        device_bytes: Bytes that they have on their devices, activations not counted.
        largest_parameter: The largest matrix that Muon steps.
        checkpoint_bytes: Bytes of one checkpoint with optimizer state, on all nodes; None: not known.
        checkpoints: How many of them the run saves.
    """

    directory_bytes: tuple[int, ...] = ()
    host_bytes: int | None = None
    staging_bytes: int = 0
    device_bytes: int = 0
    largest_parameter: ParameterFacts | None = None
    checkpoint_bytes: int | None = None
    checkpoints: Coming = field(default_factory=Coming)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagFacts:
    """What Megatron's parser takes after a flag, in argparse's words.

    Attributes:
        nargs: How many words: a number, ``+``, ``*`` or ``?``; None: one.
        kind: ``int`` or ``float`` where they are numbers; any other: not known.
        choices: Which ones there are; empty: any.
    """

    nargs: int | str | None = None
    kind: str = ""
    choices: tuple[str | int | float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronFacts:
    """The software that would train, as its probe found it (`megatron.probe.ProbeAnswer` says more).

    Attributes:
        version: Version of Megatron.
        root: Folder that it is imported from.
        flags: What its parser takes after each flag, by attribute names with underscores; None: not known.
        chunked_offloader: It brings a chunked optimizer-state offloader of its own.
        offloader_lacks: What that one lacks of what ``engine=mapped`` relies upon.
        layer_wise: It has the layer-wise optimizer that is taken over.
        torch_version: Version of torch.
        torch_cuda: CUDA version that torch was built for.
        transformer_engine: Transformer Engine is installed.
        optimizers_version: Version of emerging-optimizers.
        newton_schulz: Steps that run, by coefficient type; empty: not known.
        adaptive_muon: Why adaptive Muon cannot be built; empty if it can, None: not known.
    """

    version: str | None = None
    root: str | None = None
    flags: Mapping[str, FlagFacts] | None = None
    chunked_offloader: bool = False
    offloader_lacks: tuple[str, ...] = ()
    layer_wise: bool = False
    torch_version: str | None = None
    torch_cuda: str | None = None
    transformer_engine: bool = False
    optimizers_version: str | None = None
    newton_schulz: Mapping[str, frozenset[int]] = field(default_factory=dict)
    adaptive_muon: str | None = None

    def __str__(self) -> str:
        parts = (
            ("training loop", self.flags is not None),
            ("layer-wise Muon", self.layer_wise),
            ("chunked offloader of its own", self.chunked_offloader),
            ("Transformer Engine", self.transformer_engine),
        )
        has = ", ".join(f"{'has' if present else 'no'} {name}" for name, present in parts)
        return f"{self.version} ({self.root}): {has}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Facts of the machine at hand; the empty instance knows nothing.

    Attributes:
        working_directory: Folder that the command was started in.
        directories: The offload directories, in order; empty if no engine uses one or none could be chosen.
        folders: The other folders that the run names to write into, by key.
        files: Data files and the script of the config by path as given.
        data_problems: What is wrong with the content of the data files.
        pretrained: The folder of `model.from_hf`; None if there is none.
        planned: What the plan says; the empty instance if there is none.
        headroom_bytes: Host memory that a job could still take here and keep; None: not known.
        memory_limit_bytes: Limit of the control group that this process is in; None: none, or not known.
        limits: What ranks started here would inherit.
        cuda_available: Whether torch sees a GPU.
        num_gpus: GPUs that torch sees.
        layouts_told: Which layouts of the model would fit those GPUs, where the run wants more; a sentence.
        layouts_fix: The words that turn the run into the first of them; empty if there is none.
        megatron: The software that would train.
        megatron_missing: Folders of a Megatron that are not below `megatron.path`.
        megatron_beside_script: Folder of `megatron.entrypoint` if it holds a Megatron other than
            `megatron.path`.
        problems: What gathering itself found: no Megatron, no place to default to.
        muon_problems: What keeps Muon from training here: a stub package, another layer-wise optimizer.
    """

    working_directory: Path | None = None
    directories: tuple[DirectoryFacts, ...] = ()
    folders: Mapping[str, DirectoryFacts] = field(default_factory=dict)
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    data_problems: tuple[Problem, ...] = ()
    pretrained: PretrainedFacts | None = None
    planned: PlannedFacts = PlannedFacts()
    headroom_bytes: int | None = None
    memory_limit_bytes: int | None = None
    limits: ProcessLimits = NO_LIMITS
    cuda_available: bool | None = None
    num_gpus: int | None = None
    layouts_told: str = ""
    layouts_fix: str = ""
    megatron: MegatronFacts | None = None
    megatron_missing: tuple[str, ...] = ()
    megatron_beside_script: str | None = None
    problems: tuple[Problem, ...] = ()
    muon_problems: tuple[Problem, ...] = ()

    @property
    def maps_natively(self) -> bool:
        """Tell whether ``engine=mapped`` extends the offloader that the Megatron at hand brings."""
        return self.megatron is not None and self.megatron.chunked_offloader
