"""What one rank holds and moves: chunks by tier, bytes, memory, and what a step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muon_offload_cli.config.rules.family import ADAPTIVE_MUON
from muon_offload_cli.config.schema import OptimizerConfig
from muon_offload_cli.offload.plan import Chunk, ChunkPlan, ParameterSpec, Tier, plan_for, window_sizes
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.planner.tensors import TensorInfo
from muon_offload_cli.storage.stripes import Stripes

STATE_BYTES = 4
"""Bytes an element of each kind of state: fp32."""


def muon_state_bytes(optimizer: OptimizerConfig) -> int:
    """Return the bytes an element of Muon's state: master, momentum, and adaptive Muon's second moment.

    Of the latter there is an element for each of the weight's (``adaptive_muon_moment2_method`` in
    megatron/core/optimizer/optimizer_config.py, which no flag changes).
    """
    return STATE_BYTES * (3 if optimizer.name == ADAPTIVE_MUON else 2)


ADAM_STATE_BYTES = 12
"""Bytes an element: two moments and master weight, fp32 each."""

WEIGHT_BYTES = 2
"""Bytes an element of the model: bf16."""

GRADIENT_BYTES = 4
"""Bytes an element: Megatron reduces bf16 models' gradients in fp32 (training/arguments.py)."""

BF16_GRADIENT_BYTES = 2
"""The same with ``--grad-reduce-in-bf16``; the optimizers then step fp32 copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """Figures of one rank, in bytes, elements and counts.

    Attributes:
        parameters: Elements of the model's weights on the rank.
        muon_parameters: Elements that Muon owns here.
        adam_parameters: Elements of which Adam's state is here.
        momentum_bytes: Muon's momenta.
        master_bytes: Muon's master weights.
        second_moment_bytes: Adaptive Muon's second moments.
        disk_bytes: Reserved on disk, alignment included.
        host_bytes: Host memory that holds state between steps, alignment included.
        gpu_bytes: Device memory that holds Muon's state between steps, alignment included.
        staging_bytes: Host memory of the staging rings.
        window_bytes: Device memory of the windows.
        weight_bytes: Device memory of the model's weights.
        gradient_bytes: Device memory of the gradients.
        gradient_copy_bytes: Device memory of fp32 copies of gradients while the rank steps: those of all that
            Adam steps, made before the first chunk and gone after the step, and those of one chunk of
            Muon's; all of Muon's as well with ``none``, with ``mapped`` (which Megatron's own offloader may
            serve), and where they are widened at once. 0 where gradients are fp32 themselves.
        adam_state_bytes: Device memory of Adam's state.
        chunks: Chunks of the plan.
        chunks_on_disk: Those of them that live on disk.
        windows: Places for chunks on the device.
        largest_bytes: State of the largest parameter that Muon owns here.
        open_files: Files that the offloader keeps open.
        maps: Mappings that it makes: rings, host memory, and the file once its views are asked for; of
            several files, every stripe.
        each_way_bytes: What one optimizer step reads from the drive, and as much that it writes to it. Steps
            go through the chunks forward and backward in turn, so that what the windows still hold is used
            first and neither written nor read again; it is the mean of the two directions.
        each_way_behind_bytes: Part of `each_way_bytes` that moves while forward and backward run: what the
            staging ring takes of the next step's reads, and what is left in the other to be written.
    """

    parameters: int
    muon_parameters: int
    adam_parameters: int
    momentum_bytes: int
    master_bytes: int
    second_moment_bytes: int
    disk_bytes: int
    host_bytes: int
    gpu_bytes: int
    staging_bytes: int
    window_bytes: int
    weight_bytes: int
    gradient_bytes: int
    gradient_copy_bytes: int
    adam_state_bytes: int
    chunks: int
    chunks_on_disk: int
    windows: int
    largest_bytes: int
    open_files: int
    maps: int
    each_way_bytes: int
    each_way_behind_bytes: int

    @property
    def muon_state_bytes(self) -> int:
        """All of Muon's state, without alignment."""
        return self.momentum_bytes + self.master_bytes + self.second_moment_bytes

    @property
    def device_bytes(self) -> int:
        """All that stays on the training device between steps, activations not counted."""
        return (
            self.gpu_bytes
            + self.window_bytes
            + self.weight_bytes
            + self.gradient_bytes
            + self.adam_state_bytes
        )

    @property
    def stepping_bytes(self) -> int:
        """All that is on the training device while the optimizer steps, when activations are gone."""
        return self.device_bytes + self.gradient_copy_bytes


def rank_figures(
    owned: Sequence[TensorInfo],
    *,
    held_elements: int,
    adam_elements: int,
    settings: OffloadSettings,
    item_bytes: int = 2 * STATE_BYTES,
    bf16_gradients: bool = False,
    widened_at_once: bool = False,
) -> RankFigures:
    """Plan one rank.

    Args:
        owned: Parameters that Muon owns here, in the order of the optimizer's groups.
        held_elements: Elements of all weights on the rank.
        adam_elements: Elements of which Adam's state is here.
        settings: What the offloader will be told; engine ``none`` moves nothing.
        item_bytes: What `muon_state_bytes` returns.
        bf16_gradients: Megatron is told ``--grad-reduce-in-bf16``.
        widened_at_once: The norm, or a count, may need fp32 copies of all of them at the same time.
    """
    muon = sum(tensor.numel for tensor in owned)
    second_moments = item_bytes > 2 * STATE_BYTES
    plan = _plan(owned, settings, second_moments)
    streamed = plan.of_tier(Tier.HOST, Tier.DISK)
    disk, host = plan.bytes_of(Tier.DISK), plan.bytes_of(Tier.HOST)
    staged = settings.engine == "disk" and disk > 0
    slots, piece_bytes = settings.staging_rings(disk) if staged else (0, 0)
    files = max(1, len(settings.directories))
    windows = window_sizes(streamed, settings.windows)
    resident = settings.engine == "none"
    each_way = _each_way_bytes(streamed, settings.windows)
    return RankFigures(
        parameters=held_elements,
        muon_parameters=muon,
        adam_parameters=adam_elements,
        momentum_bytes=muon * STATE_BYTES,
        master_bytes=muon * STATE_BYTES,
        second_moment_bytes=muon * STATE_BYTES * second_moments,
        disk_bytes=disk,
        host_bytes=host,
        gpu_bytes=muon * item_bytes if resident else plan.bytes_of(Tier.GPU),
        staging_bytes=2 * slots * piece_bytes,
        window_bytes=sum(windows),
        weight_bytes=held_elements * WEIGHT_BYTES,
        gradient_bytes=held_elements * (BF16_GRADIENT_BYTES if bf16_gradients else GRADIENT_BYTES),
        gradient_copy_bytes=(_widened(plan, muon, settings.engine, at_once=widened_at_once) + adam_elements)
        * GRADIENT_BYTES
        * bf16_gradients,
        adam_state_bytes=adam_elements * ADAM_STATE_BYTES,
        chunks=len(plan.chunks),
        chunks_on_disk=len(plan.of_tier(Tier.DISK)),
        windows=len(windows),
        largest_bytes=max((tensor.numel for tensor in owned), default=0) * item_bytes,
        open_files=files if disk else 0,
        # One mapping a ring, one of the host tier's memory, and those of the files for their views.
        maps=2 * staged + (host > 0) + _file_maps(disk, files, mapped=settings.engine == "mapped"),
        each_way_bytes=each_way,
        # Without a ring nothing moves then.
        each_way_behind_bytes=min(slots * piece_bytes, each_way),
    )


def _file_maps(disk: int, files: int, *, mapped: bool) -> int:
    """Count the mappings of one file, or of the stripes of several (and each file's own under ``mapped``)."""
    if files == 1 or not disk:
        return int(disk > 0)
    return Stripes(size=disk, files=files).count + files * mapped


def _widened(plan: ChunkPlan, muon: int, engine: str, *, at_once: bool) -> int:
    """Count Muon's elements whose gradients exist in fp32 at once (see megatron/late_gradients.py)."""
    if engine in ("none", "mapped") or at_once:
        return muon
    masters = (sum(slot.nbytes for slot in chunk.masters) for chunk in plan.chunks)
    return max(masters, default=0) // STATE_BYTES


def _plan(owned: Sequence[TensorInfo], settings: OffloadSettings, second_moments: bool) -> ChunkPlan:
    if settings.engine == "none" or not owned:
        return ChunkPlan(chunks=())
    return plan_for(
        settings,
        [
            ParameterSpec(
                shape=tensor.shape,
                domain=tensor.expert,
                second_moment=tensor.shape if second_moments else None,
            )
            for tensor in owned
        ],
    )


def _each_way_bytes(streamed: Sequence[Chunk], windows: int) -> int:
    """Count a step's bytes on disk (see `Pipeline` in offload/pipeline.py for the order)."""

    def on_disk(chunks: Sequence[Chunk]) -> int:
        return sum(chunk.nbytes for chunk in chunks if chunk.tier is Tier.DISK)

    # A forward pass ends with the last chunks in the windows, a backward pass with the first ones; the next
    # pass begins with them, so they are neither read nor written in between.
    kept = (on_disk(streamed[-windows:]) + on_disk(streamed[:windows])) // 2
    return on_disk(streamed) - kept
