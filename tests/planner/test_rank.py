"""Figures of ranks, against reports of real runs and of the pipeline's own order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.planner.rank import rank_figures
from muon_offload_cli.storage.stripes import Stripes
from muon_offload_cli.units import MIB
from tests.planner.plans import planner, tensor

# muon_parameters, disk_bytes, host_bytes, gpu_bytes, chunks and adam_state_bytes of reports/rank_N.json after
# `train recipe=tiny train.steps=1` with these words, megatron-core 0.19.2 on CPU ranks. The reports count
# 4 bytes more of Adam's for the step count of each of its tensors.
REPORTED = {
    (): [(1773568, 14188544, 0, 0, 37, 800256)] * 4,
    ("parallel=data", "launcher=two_ranks", "model=tiny_dense"): [(1179648, 9437184, 0, 0, 8, 1193472)] * 2,
    ("parallel=data", "parallel.ep=2"): [(1771520, 14172160, 0, 0, 19, 596736)] * 4,
    ("parallel.etp=1",): [(1773568, 14188544, 0, 0, 21, 800256)] * 4,
    ("parallel=data", "parallel.ep=2", "megatron.param_layout=false"): [
        (1703936, 13631488, 0, 0, 18, 9216),
        (1771520, 14172160, 0, 0, 19, 1185792),
        (1771520, 14172160, 0, 0, 19, 1185792),
        (1839104, 14712832, 0, 0, 19, 6144),
    ],
    ("offload.host_memory_gb=0.02", "offload.fraction=0.5"): [
        (1773568, 1835008, 5259264, 7094272, 38, 800256)
    ]
    * 4,
    ("parallel.pp=2", "parallel.ep=1", "model.tied_embeddings=true"): [
        (1773568, 14188544, 0, 0, 37, 798720),
        (1773568, 14188544, 0, 0, 37, 798720),
        (1773568, 14188544, 0, 0, 37, 801792),
        (1773568, 14188544, 0, 0, 37, 801792),
    ],
    (
        "parallel.pp=2",
        "parallel.ep=1",
        "parallel.decoder_first_pipeline_num_layers=1",
        "parallel.decoder_last_pipeline_num_layers=3",
    ): [
        (886784, 7094272, 0, 0, 19, 792576),
        (886784, 7094272, 0, 0, 19, 792576),
        (2660352, 21282816, 0, 0, 55, 807936),
        (2660352, 21282816, 0, 0, 55, 807936),
    ],
    ("model=tiny_delta",): [
        (403072, 3231744, 0, 0, 7, 416688),
        (403072, 3231744, 0, 0, 7, 416688),
        (402944, 3223552, 0, 0, 7, 414048),
        (402944, 3223552, 0, 0, 7, 414048),
    ],
    ("model=tiny_latent", "parallel=data", "parallel.ep=4"): [
        (243712, 1949696, 0, 0, 6, 299904),
        (243712, 1949696, 0, 0, 5, 299136),
        (241664, 1933312, 0, 0, 5, 299136),
        (240640, 1925120, 0, 0, 5, 299904),
    ],
}


@pytest.mark.parametrize("words", list(REPORTED), ids=" ".join)
def test_planned_bytes_equal_what_running_ranks_reported(words: tuple[str, ...]) -> None:
    plan = planner("tiny", *words).plan()
    planned = {rank: kind.figures for kind in plan.kinds for rank in kind.ranks}
    assert [
        (
            own.muon_parameters,
            own.disk_bytes,
            own.host_bytes,
            own.gpu_bytes,
            own.chunks,
            own.adam_state_bytes,
        )
        for _, own in sorted(planned.items())
    ] == REPORTED[words]


def test_the_bytes_of_a_step_are_the_mean_of_what_steps_of_a_run_moved() -> None:
    # `train recipe=tiny train.steps=5 offload.chunk_mb=1`: a rank read 11829248 and 11796480 bytes in turn.
    own = planner("tiny", "offload.chunk_mb=1").plan().heaviest.figures
    assert own.each_way_bytes == (11829248 + 11796480) // 2


SETTINGS = OffloadSettings(engine="disk", chunk_bytes=MIB // 4, staging_bytes=MIB)
OWNED = [tensor(8192) for _ in range(40)]


def test_engines_differ_in_where_state_and_buffers_are() -> None:
    disk, mapped, host, none = (
        rank_figures(
            OWNED, held_elements=10**6, adam_elements=1000, settings=replace(SETTINGS, engine=engine)
        )
        for engine in ("disk", "mapped", "host", "none")
    )
    state = 40 * 8192 * 8
    assert [own.disk_bytes for own in (disk, mapped, host, none)] == [state, state, 0, 0]
    assert [own.host_bytes for own in (disk, mapped, host, none)] == [0, 0, state, 0]
    assert [own.gpu_bytes for own in (disk, mapped, host, none)] == [0, 0, 0, state]
    assert [own.staging_bytes > 0 for own in (disk, mapped, host, none)] == [True, False, False, False]
    assert [own.window_bytes for own in (disk, mapped, host, none)] == [3 * MIB // 4] * 3 + [0]
    assert [(own.open_files, own.maps) for own in (disk, mapped, host, none)] == [
        (1, 3),
        (1, 1),
        (0, 1),
        (0, 0),
    ]
    assert host.each_way_bytes == none.each_way_bytes == mapped.each_way_behind_bytes == 0


@pytest.mark.parametrize(
    ("engine", "more", "at_once"),
    [
        ("disk", (), False),
        ("host", (), False),
        ("mapped", (), True),
        ("none", (), True),
        ("disk", ("megatron.param_layout=false",), True),
        ("disk", ("megatron.args.log_num_zeros_in_grad=true",), True),
    ],
)
def test_bf16_gradients_are_half_as_large_and_copied_in_fp32_while_a_rank_steps(
    engine: str, more: tuple[str, ...], at_once: bool
) -> None:
    words = ("model=tiny_dense", "parallel=data", "launcher=two_ranks", f"offload={engine}", *more)
    words += ("offload.chunk_mb=4",) if engine != "none" else ()
    plain, bf16 = (
        planner("tiny", *words, *narrow).plan().heaviest.figures
        for narrow in ((), ("megatron.args.grad-reduce-in-bf16=true",))
    )
    assert (plain.gradient_bytes, plain.gradient_copy_bytes) == (4 * plain.parameters, 0)
    assert bf16.gradient_bytes == 2 * bf16.parameters
    muons = bf16.gradient_copy_bytes - 4 * bf16.adam_parameters
    if at_once:
        assert muons == 4 * bf16.muon_parameters
    else:
        # Half of a chunk's state is master weights.
        assert bf16.largest_bytes // 2 <= muons <= 2 * MIB < 4 * bf16.muon_parameters
    assert bf16.stepping_bytes - bf16.device_bytes == bf16.gradient_copy_bytes


def test_a_striped_rank_opens_a_file_a_directory_and_maps_every_stripe() -> None:
    given = replace(SETTINGS, directories=(Path("/a"), Path("/b"), Path("/c")))
    own = rank_figures(OWNED, held_elements=0, adam_elements=0, settings=given)
    assert (own.open_files, own.maps) == (3, 2 + Stripes(size=own.disk_bytes, files=3).count)


def test_adaptive_muon_has_a_third_of_its_state_in_second_moments() -> None:
    plans = [
        planner("tiny", "optimizer=muon", f"optimizer.name={name}").plan()
        for name in ("muon", "adaptive_muon")
    ]
    plain, own = (plan.heaviest.figures for plan in plans)
    assert (plain.second_moment_bytes, own.second_moment_bytes) == (0, own.muon_parameters * 4)
    assert own.muon_state_bytes == own.muon_parameters * 12
    assert own.largest_bytes * 2 == plain.largest_bytes * 3
    assert own.disk_bytes >= own.muon_state_bytes
    assert plans[1].checkpoint_bytes - plans[0].checkpoint_bytes == plans[0].muon_parameters * 4


@given(st.lists(st.integers(1, 10**6), max_size=60), st.integers(0, 4), st.integers(2, 4), st.floats(0, 1))
def test_state_is_in_some_tier_and_what_windows_hold_does_not_move(
    sizes: list[int], chunk_mib: int, windows: int, fraction: float
) -> None:
    settings = replace(SETTINGS, chunk_bytes=chunk_mib * MIB, windows=windows, fraction=fraction)
    own = rank_figures([tensor(size) for size in sizes], held_elements=0, adam_elements=0, settings=settings)
    stored = own.disk_bytes + own.host_bytes + own.gpu_bytes
    assert own.muon_state_bytes <= stored <= own.muon_state_bytes + 1024 * len(sizes) + 4096 * own.chunks
    assert 0 <= own.each_way_behind_bytes <= own.each_way_bytes <= own.disk_bytes
    if own.chunks_on_disk <= windows:
        assert own.each_way_bytes == 0
