"""The resolved configuration of a run, as dataclasses.

Hydra merges `conf/`, a recipe and the user's overrides into this schema, so every key that exists is
named here and an unknown one is refused. The dataclasses are not frozen and use `Enum`s rather than
`Literal`s because OmegaConf needs it so. Rules that relate keys live in `rules`, not here:
``__post_init__`` would run before the values are merged.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
    """Where tokens come from; ``stdlib`` is the source of the Python standard library, as bytes."""

    stdlib = "stdlib"
    text = "text"
    indexed = "indexed"
    mock = "mock"


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
        disk_read_gbps: What a node's drives read while they also write, in GB/s; null: not known.
        disk_write_gbps: What they write meanwhile.
    """

    name: str = "local"
    gpus_per_node: int | None = None
    host_memory_gb: float | None = None
    disk_read_gbps: float | None = None
    disk_write_gbps: float | None = None


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
    """Megatron's parallel sizes. `etp` null follows `tp`, as in Megatron."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False


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
        name: ``dist_muon``, ``muon`` or ``adam``.
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
        directory: Absolute folder on a node-local drive; null: ``$SCRATCH/muon_offload`` or
            ``/tmp/muon_offload_<uid>``.
        chunk_mb: MiB of state that move as one unit; 0: everything at once.
        fraction: Part of the state's bytes that leaves the device, 0 to 1.
        host_memory_gb: GiB of host memory a node that hold state for good before the disk is used:
            a number, or ``auto``.
        windows: Chunks that have a place on the device at the same time.
        io_threads: Threads that read and threads that write, each, on every rank.
        staging_mb: MiB of pinned staging ring a rank.
    """

    engine: Engine = Engine.disk
    directory: str | None = None
    chunk_mb: float = 512
    fraction: float = 1.0
    host_memory_gb: str = "0"
    windows: int = 3
    io_threads: int = 8
    staging_mb: float = 192


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixture-of-experts layers; `num_experts` null: a dense model.

    Names follow Megatron's flags: `topk` is ``--moe-router-topk``, `ffn_hidden_size` is
    ``--moe-ffn-hidden-size``, `layer_freq` is ``--moe-layer-freq``.
    """

    num_experts: int | None = None
    topk: int = 2
    ffn_hidden_size: int | None = None
    shared_expert_ffn_hidden_size: int | None = None
    layer_freq: str | None = None
    aux_loss_coeff: float = 0.0
    load_balancing: str = "aux_loss"
    grouped_gemm: bool = False


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a GPT, in Megatron's names.

    `kv_channels` is the size of one attention head; null: hidden_size / num_attention_heads.
    `vocab_size` null: taken from the data source (256 bytes and an end-of-document token for text).
    """

    name: str = MISSING
    num_layers: int = MISSING
    hidden_size: int = MISSING
    ffn_hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_query_groups: int | None = None
    kv_channels: int | None = None
    vocab_size: int | None = None
    normalization: str = "RMSNorm"
    norm_epsilon: float = 1e-6
    swiglu: bool = True
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    qk_layernorm: bool = False
    tied_embeddings: bool = False
    add_bias_linear: bool = False
    init_std: float = 0.02
    moe: MoeConfig = field(default_factory=MoeConfig)


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training tokens.

    Attributes:
        source: Which of the ways below is used.
        paths: Text or jsonl files for ``text``.
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
    """Saving. `directory` null: nothing is saved."""

    directory: str | None = None
    interval: int = 0
    optimizer: bool = True


@dataclass(kw_only=True, slots=True)
class ResumeConfig:
    """Loading. `source` null: start afresh; a checkpoint directory otherwise."""

    source: str | None = None


@dataclass(kw_only=True, slots=True)
class MegatronConfig:
    """The Megatron that trains.

    Attributes:
        path: A checkout that goes before the installed package; null: the installed package.
        entrypoint: A training script of the user's own; null: ours.
        param_layout: Megatron's shard-aligned parameter layout with an Adam sibling
            (``false``: the older layer-wise path).
        args: Further Megatron flags by name without dashes, ``recompute_granularity: full``; true
            gives a flag alone.
    """

    path: str | None = None
    entrypoint: str | None = None
    param_layout: bool = True
    args: dict[str, Any] = field(default_factory=dict)


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
