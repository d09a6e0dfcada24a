"""The resolved configuration of a run, as dataclasses.

Hydra merges `conf/`, a recipe and the user's overrides into this schema, so every key that exists is
named here and an unknown one is refused. The dataclasses are not frozen and use `Enum`s rather than
`Literal`s because OmegaConf needs it so. Rules that relate keys live in `rules`, not here:
``__post_init__`` would run before the values are merged.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from muon_offload_cli.config.model_schema import ModelConfig


class Device(enum.Enum):
    """Where the model trains: ``auto`` takes CUDA where torch sees a GPU, else the CPU rehearsal."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Engine(enum.Enum):
    """Where Muon's state lives between steps."""

    none = "none"
    host = "host"
    mapped = "mapped"
    disk = "disk"


class DataSource(enum.Enum):
    """Where tokens come from.

    ``stdlib`` is the source of the Python standard library, as bytes; ``chat`` is prompts and responses.
    ``script``: `megatron.entrypoint` brings its own, and gets no flag of data or of the tokenizer but the
    size of the vocabulary.
    """

    stdlib = "stdlib"
    text = "text"
    indexed = "indexed"
    chat = "chat"
    mock = "mock"
    script = "script"


class Verify(enum.Enum):
    """How much of what is read from disk is compared with its checksum."""

    off = "off"
    sample = "sample"
    full = "full"


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """The run folder.

    Attributes:
        directory: Absolute or relative folder; null: ``runs/<recipe>/<time>``.
        digest: Hash weights, masters and momenta at the end into each rank's report.
    """

    directory: str | None = None
    digest: bool = False


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Facts of the machines that a recipe is meant for.

    Attributes:
        name: ``local`` means the machine at hand.
        gpus_per_node: GPUs of one node, 0 if it has none.
        host_memory_gb: Host memory of one node in GiB; null: not known.
        drives: Node-local drives of one node that can hold state; null: not known.
        drive_tb: Size of one of them in TB (10**12 bytes); null: not known.
        read_gb_s: What a node reads from its drives, in GB/s (10**9 bytes); null: not measured.
        write_gb_s: What a node writes to them, in GB/s; null: not measured.
    """

    name: str = "local"
    gpus_per_node: int | None = None
    host_memory_gb: float | None = None
    drives: int | None = None
    drive_tb: float | None = None
    read_gb_s: float | None = None
    write_gb_s: float | None = None


@dataclass(kw_only=True, slots=True)
class LauncherConfig:
    """How many processes start, and where they meet.

    Attributes:
        nodes: Machines; the same command runs on each of them.
        ranks_per_node: Processes a machine, one a GPU.
        node_rank: Number of this machine, 0 to nodes - 1.
        master_address: Host name of node 0; needed for more than one node.
        master_port: Port on node 0; null: a free one (one node only).
    """

    nodes: int = 1
    ranks_per_node: int = 1
    node_rank: int = 0
    master_address: str | None = None
    master_port: int | None = None


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Megatron's parallel sizes.

    Attributes:
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        cp: Context parallel size.
        ep: Expert parallel size.
        etp: Tensor parallel size of experts; null follows `tp`, as in Megatron.
        sequence_parallel: Cut activations outside of matrices over tensor-parallel ranks.
        decoder_first_pipeline_num_layers: Layers of the first pipeline stage, if it differs.
        decoder_last_pipeline_num_layers: Layers of the last pipeline stage, if it differs.
        num_virtual_stages_per_pipeline_rank: Model chunks of each pipeline rank (interleaved schedule).
        pipeline_model_parallel_layout: Megatron's text of the stages, one letter a layer
            (``E`` embedding, ``t`` decoder, ``m`` multi-token prediction, ``L`` loss), ``|`` between.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    pipeline_model_parallel_layout: str | None = None


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The training loop. `global_batch` counts sequences of `sequence_length` tokens a step."""

    steps: int = MISSING
    sequence_length: int = MISSING
    micro_batch: int = 1
    global_batch: int = MISSING
    seed: int = 1234


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer of the matrices, and Adam's values for embeddings and norms.

    Attributes:
        name: ``dist_muon``, ``muon``, ``adaptive_muon`` or ``adam``.
        lr: Peak learning rate.
        min_lr: Learning rate at the end of the decay.
        lr_warmup_steps: Steps of linear warm-up.
        lr_decay_style: ``constant``, ``linear`` or ``cosine``.
        weight_decay: Decoupled weight decay.
        clip_grad: Global gradient norm to clip at; 0 does not clip.
        distributed: Megatron's distributed optimizer (Adam; Megatron clears it for Muon).
        layer_wise: Whole parameters are owned by data-parallel ranks; implied by ``dist_muon``.
        muon_momentum: Momentum of Muon. Megatron's parser and its dataclass have different
            defaults, so it is always passed.
        muon_nesterov: Nesterov momentum.
        muon_split_qkv: Orthogonalize Q, K and V apart.
        muon_num_ns_steps: Newton-Schulz steps.
        muon_coefficient_type: Newton-Schulz coefficients.
        muon_scale_mode: How the update is scaled by the shape.
        muon_tp_mode: How a tensor-parallel parameter is orthogonalized: ``blockwise``,
            ``duplicated`` or ``distributed``.
        adam_beta1: First moment decay of Adam.
        adam_beta2: Second moment decay of Adam.
        adam_eps: Epsilon of Adam.
    """

    name: str = "dist_muon"
    lr: float = MISSING
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_style: str = "constant"
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    distributed: bool = False
    layer_wise: bool = False
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    muon_split_qkv: bool = True
    muon_num_ns_steps: int = 5
    muon_coefficient_type: str = "quintic"
    muon_scale_mode: str = "spectral"
    muon_tp_mode: str = "duplicated"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    """Where Muon's momentum and master weights live between steps.

    Attributes:
        engine: ``none``, ``host``, ``mapped`` or ``disk``.
        directory: Absolute folder on a node-local drive, or a list of them, one a drive, which get equal
            parts; null: ``$SCRATCH/muon_offload`` or ``/tmp/muon_offload_<uid>``.
        chunk_mb: MiB of state that move as one unit; 0: everything at once.
        fraction: Part of the state's bytes that leaves the device, 0 to 1.
        host_memory_gb: GiB of host memory a node that hold state for good before the disk is used:
            a number, or ``auto``.
        windows: Chunks that have a place on the device at the same time.
        io_threads: Threads that read and threads that write, each, on every rank.
        staging_mb: MiB of pinned staging ring a rank.
        verify: Compare what is read from the file with checksums kept at write-back: ``off``, ``sample``
            (one request in 16) or ``full``.
    """

    engine: Engine = Engine.disk
    directory: list[str] | None = None
    chunk_mb: float = 512
    fraction: float = 1.0
    host_memory_gb: str = "0"
    windows: int = 3
    io_threads: int = 8
    staging_mb: float = 192
    verify: Verify = Verify.off

    @property
    def host_memory_gib(self) -> float | None:
        """`host_memory_gb` as a number: None for ``auto``, NaN for what is neither."""
        try:
            return None if self.host_memory_gb == "auto" else float(self.host_memory_gb)
        except ValueError:
            return math.nan


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training tokens.

    Attributes:
        source: Which of the ways below is used.
        paths: Text or jsonl files for ``text``; jsonl files of examples for ``chat``.
        prefix: Path without suffix of a prepared ``.bin``/``.idx`` pair for ``indexed``.
        cache_directory: Where prepared byte datasets are kept; null: the user's cache folder.
        jsonl_key: Field of a jsonl line that holds the text.
    """

    source: DataSource = DataSource.stdlib
    paths: list[str] = field(default_factory=list)
    prefix: str | None = None
    cache_directory: str | None = None
    jsonl_key: str = "text"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Saving.

    Attributes:
        directory: Folder of this run's checkpoints, reached by all nodes; null: nothing is saved.
        interval: Steps from one checkpoint to the next; 0: one at the end.
        keep: Checkpoints that stay, the newest ones; null: all of them.
        optimizer: Save optimizer state, not only weights.
    """

    directory: str | None = None
    interval: int = 0
    keep: int | None = None
    optimizer: bool = True


@dataclass(kw_only=True, slots=True)
class ResumeConfig:
    """Loading; ``resume=X`` on the command line is short for ``resume.source=X``.

    Attributes:
        source: ``auto``: the newest complete checkpoint below `checkpoint.directory`, or a new start if there
            is none; a number: that step of it; a path: a checkpoint directory or one ``iter_N`` folder in it;
            ``none`` or null: a new start, which saves only where no checkpoint stands.
        step: Step to load from a path; null: the newest complete one. The launcher fills it in.
        weights_only: Take the weights and begin a new run with them.
    """

    source: str | None = None
    step: int | None = None
    weights_only: bool = False


@dataclass(kw_only=True, slots=True)
class MegatronConfig:
    """The Megatron that trains.

    Attributes:
        path: A checkout that goes before the installed package; null: the installed package.
        entrypoint: A training script of the user's own; null: ours. It gets the flags of this configuration,
            then `args`, then `script_args`.
        param_layout: Megatron's shard-aligned parameter layout with an Adam sibling
            (``false``: the older layer-wise path).
        args: Further Megatron flags by name without dashes, ``recompute_granularity: full``; true
            gives a flag alone.
        script_args: Words that end the script's command line as they are: ``[--my_flag,3]``.
    """

    path: str | None = None
    entrypoint: str | None = None
    param_layout: bool = True
    args: dict[str, Any] = field(default_factory=dict)
    script_args: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Config:
    """A whole run."""

    recipe: str = MISSING
    description: str = ""
    device: Device = Device.auto
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
