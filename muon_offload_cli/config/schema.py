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
class MoeConfig:
    """Mixture-of-experts layers; `num_experts` null: a dense model.

    Names follow Megatron's flags without ``moe-``: `router_group_topk` is ``--moe-router-group-topk``.

    Attributes:
        num_experts: Routed experts of a layer.
        topk: Experts that a token visits, ``--moe-router-topk``.
        ffn_hidden_size: Width of a routed expert.
        shared_expert_ffn_hidden_size: Width of all shared experts together,
            ``--moe-shared-expert-intermediate-size``; null: there are none.
        shared_expert_gate: Shared experts are weighted by a gate of their own.
        layer_freq: Which layers have experts: a number N (every N-th, counted from the first) or a list
            such as ``([0]*1+[1]*26)``, 1 for experts; null: all layers.
        aux_loss_coeff: Weight of the load-balancing loss.
        load_balancing: ``aux_loss``, ``seq_aux_loss``, ``sinkhorn`` or ``none``.
        router_score_function: ``softmax`` or ``sigmoid``.
        router_pre_softmax: Scores are normalized over all experts before the best are chosen.
        router_enable_expert_bias: A bias that no gradient moves balances the experts (sigmoid only).
        router_bias_update_rate: Step of that bias.
        router_num_groups: Groups of experts for group-limited routing.
        router_group_topk: Groups that a token may visit.
        router_topk_scaling_factor: Factor on the chosen scores.
        router_dtype: ``fp32`` or ``fp64`` scores; null: as the model.
        grouped_gemm: One grouped kernel for all local experts; needs Transformer Engine.
    """

    num_experts: int | None = None
    topk: int = 2
    ffn_hidden_size: int | None = None
    shared_expert_ffn_hidden_size: int | None = None
    shared_expert_gate: bool = False
    layer_freq: str | None = None
    aux_loss_coeff: float = 0.0
    load_balancing: str = "aux_loss"
    router_score_function: str = "softmax"
    router_pre_softmax: bool = False
    router_enable_expert_bias: bool = False
    router_bias_update_rate: float = 0.001
    router_num_groups: int | None = None
    router_group_topk: int | None = None
    router_topk_scaling_factor: float | None = None
    router_dtype: str | None = None
    grouped_gemm: bool = False


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a GPT, in Megatron's names.

    Attributes:
        name: Name of the part below ``conf/model``.
        from_hf: Folder of a Hugging Face model: its ``config.json`` gives the numbers below that nothing else
            gives, and must agree with the others; null: there is none.
        hf_weights: Begin with the weights of that folder, through Megatron-Bridge; false: with random ones.
        hf_tokenizer: Take that folder's tokenizer where the tokens are no bytes.
        num_layers: Transformer layers, multi-token prediction not counted.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the feed-forward part of dense layers.
        num_attention_heads: Query heads.
        num_query_groups: Key-value heads; null: as many as query heads. Not read by latent attention.
        kv_channels: Size of one attention head; null: hidden_size / num_attention_heads.
        attention_output_gate: Attention's output is gated by a second half of the query projection.
        vocab_size: Token ids; null: taken from the data source (256 bytes and an end-of-document token).
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this times `parallel.tp`.
        normalization: ``RMSNorm`` or ``LayerNorm``.
        norm_epsilon: Epsilon of all norms.
        apply_layernorm_1p: Norms multiply by 1 + weight, the weight born as zero.
        swiglu: Gated feed-forward layers.
        rotary_base: Base of the rotary positions.
        rotary_percent: Part of a head that is rotated.
        qk_layernorm: Norms on queries and keys; on both latents for latent attention.
        tied_embeddings: The output layer uses the embedding's weight.
        add_bias_linear: Biases on all linear layers.
        add_qkv_bias: Biases on the query-key-value projection alone.
        init_std: Standard deviation of new weights.
        multi_latent_attention: DeepSeek's attention; the five sizes below belong to it.
        q_lora_rank: Rank of the queries' latent; null: queries are projected at once.
        kv_lora_rank: Rank of the latent of keys and values.
        qk_head_dim: Size of a head's part without positions.
        qk_pos_emb_head_dim: Size of a head's rotated part.
        v_head_dim: Size of a value head.
        rope_type: ``rope`` or ``yarn``; read by latent attention.
        rotary_scaling_factor: YaRN's stretch of the context.
        mscale: YaRN's scale of attention.
        mscale_all_dim: The same over all dimensions.
        experimental_attention_variant: ``gated_delta_net`` puts linear attention into the layers that
            `linear_attention_freq` names.
        linear_attention_freq: A number N (every N-th layer keeps softmax attention) or a list of 0 and 1.
        linear_num_key_heads: Key heads of linear attention.
        linear_num_value_heads: Value heads of linear attention.
        linear_key_head_dim: Size of such a key head.
        linear_value_head_dim: Size of such a value head.
        linear_conv_kernel_dim: Width of the causal convolution before it.
        mtp_num_layers: Layers that predict a further token each; null: none.
        mtp_loss_scaling_factor: Weight of their loss.
        moe: Experts.
    """

    name: str = MISSING
    from_hf: str | None = None
    hf_weights: bool = True
    hf_tokenizer: bool = True
    num_layers: int = MISSING
    hidden_size: int = MISSING
    ffn_hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_query_groups: int | None = None
    kv_channels: int | None = None
    attention_output_gate: bool = False
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    normalization: str = "RMSNorm"
    norm_epsilon: float = 1e-6
    apply_layernorm_1p: bool = False
    swiglu: bool = True
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    qk_layernorm: bool = False
    tied_embeddings: bool = False
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    init_std: float = 0.02
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_type: str = "rope"
    rotary_scaling_factor: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    experimental_attention_variant: str | None = None
    linear_attention_freq: str | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    moe: MoeConfig = field(default_factory=MoeConfig)


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
            ``none`` or null: a new start.
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
