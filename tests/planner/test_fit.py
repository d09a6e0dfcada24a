"""Verdicts, and that what is advised does fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from muon_offload_cli.checkpoints.room import Coming
from muon_offload_cli.machine.filesystem import Mount
from muon_offload_cli.planner.fit import Fit, judge_fit
from muon_offload_cli.planner.settings import offload_settings
from muon_offload_cli.planner.space import NodeSpace, cluster_space
from muon_offload_cli.units import GIB
from tests.planner.plans import config, planner

WORDS = ("model=gpt_2b9", "parallel=tp2", "offload.chunk_mb=512", "device=cuda")
PLANNER = planner("tiny", *WORDS)
SETTINGS = offload_settings(config("tiny", *WORDS))
NEEDED = PLANNER.plan().heaviest_node.disk_bytes


def mount(free_bytes: int, point: str = "/mnt/nvme0") -> Mount:
    return Mount(
        directory=Path(point, "state"),
        existing=Path(point),
        mount_point=point,
        device=hash(point),
        kind="xfs",
        is_memory=False,
        is_network=False,
        total_bytes=10 * free_bytes,
        free_bytes=free_bytes,
        writable=True,
    )


def fit(
    free_bytes: int,
    *,
    others: tuple[Mount, ...] = (),
    memory: int = 100 * GIB,
    checkpoints: int = 0,
    freed: int = 0,
) -> Fit:
    space = NodeSpace(
        mounts=[mount(free_bytes)],
        others=others,
        headroom_bytes=memory,
        coming=Coming(saves=checkpoints, freed=freed),
        checkpoint_mount=mount(0),
    )
    return judge_fit(PLANNER.plan(), space, SETTINGS, PLANNER.plan)


def test_exactly_enough_room_fits_and_one_byte_less_does_not() -> None:
    assert fit(NEEDED).fits
    assert not fit(NEEDED - 1).fits


def test_checkpoints_on_the_same_mount_count() -> None:
    checkpoint = PLANNER.plan().checkpoint_bytes
    assert fit(NEEDED + 2 * checkpoint, checkpoints=2).fits
    short = fit(NEEDED + 2 * checkpoint - 1, checkpoints=2)
    assert short.peak_bytes == NEEDED + 2 * checkpoint
    assert "checkpoints" in short.problems[0].what
    short = fit(NEEDED + 4 * checkpoint - 1, checkpoints=4)
    assert "; or checkpoint.keep=2;" in short.problems[0].fix


def test_what_an_interrupted_save_left_is_room_for_checkpoints_and_not_for_state() -> None:
    checkpoint = PLANNER.plan().checkpoint_bytes
    assert fit(NEEDED + checkpoint, checkpoints=2, freed=checkpoint).fits
    assert not fit(NEEDED + checkpoint - 1, checkpoints=2, freed=checkpoint).fits
    assert fit(NEEDED, checkpoints=1, freed=2 * checkpoint).fits
    assert not fit(NEEDED - 1, checkpoints=1, freed=2 * checkpoint).fits


@pytest.mark.parametrize("engine", ["none", "host", "disk"])
def test_checkpoints_on_a_mount_of_their_own_need_its_room(engine: str) -> None:
    words = (*WORDS, f"offload.engine={engine}")
    run, settings = planner("tiny", *words), offload_settings(config("tiny", *words))
    needed = 2 * run.plan().checkpoint_bytes
    for free, fits in ((needed, True), (needed - 1, False)):
        space = NodeSpace(
            mounts=[mount(NEEDED)] if engine == "disk" else [],
            others=(),
            headroom_bytes=None,
            coming=Coming(saves=2),
            checkpoint_mount=mount(free, "/mnt/saved"),
        )
        problems = judge_fit(run.plan(), space, settings, run.plan).problems
        assert [problem.keys for problem in problems] == ([] if fits else [("checkpoint.directory",)])


@pytest.mark.parametrize(("room", "fix"), [(3, "checkpoint.keep=2"), (1, "free ")])
def test_the_checkpoints_that_fit_may_be_kept(room: int, fix: str) -> None:
    free = room * PLANNER.plan().checkpoint_bytes - 1
    space = NodeSpace(
        mounts=[mount(NEEDED)],
        others=(),
        headroom_bytes=None,
        coming=Coming(saves=9, freed=1),
        checkpoint_mount=mount(free, "/mnt/saved"),
    )
    (problem,) = judge_fit(PLANNER.plan(), space, SETTINGS, PLANNER.plan).problems
    assert problem.fix.startswith(fix)
    assert judge_fit(PLANNER.plan(), replace(space, keep=2), SETTINGS, PLANNER.plan).fits is (room == 3)


def test_what_is_advised_fits() -> None:
    room = NEEDED * 3 // 4
    (problem,) = fit(room, others=(mount(2 * NEEDED, "/mnt/big"), mount(room, "/mnt/small"))).problems
    assert problem.exit_code == 3
    assert "offload.directory=/mnt/big/muon_offload" in problem.fix

    (fraction,) = re.findall(r"offload\.fraction=(\S+)", problem.fix)
    assert PLANNER.plan(replace(SETTINGS, fraction=float(fraction))).heaviest_node.disk_bytes <= room
    more = float(fraction) + 0.01
    assert PLANNER.plan(replace(SETTINGS, fraction=more)).heaviest_node.disk_bytes > room

    (budget,) = re.findall(r"offload\.host_memory_gb=(\d+)", problem.fix)
    for gib, fits in ((int(budget), True), (int(budget) - 1, False)):
        settings = replace(SETTINGS, host_bytes=gib * GIB // 4)
        assert (PLANNER.plan(settings).heaviest_node.disk_bytes <= room) is fits

    (nodes,) = re.findall(r"launcher\.nodes=(\d+)", problem.fix)
    wider = planner("tiny", *WORDS, f"launcher.nodes={nodes}").plan()
    assert wider.heaviest_node.disk_bytes <= room


def test_nothing_is_advised_that_this_machine_cannot_do() -> None:
    (problem,) = fit(NEEDED // 2, memory=2 * GIB).problems
    assert "host_memory_gb" not in problem.fix
    (problem,) = fit(0).problems
    assert problem.fix.startswith("free ")
    assert ";" not in problem.fix


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("offload.engine=host",), "offload.engine=disk"),
        (("offload.host_memory_gb=10",), "offload.host_memory_gb=7"),
    ],
)
def test_host_memory_that_is_not_there_is_told(words: tuple[str, ...], fix: str) -> None:
    run = planner("tiny", *WORDS, *words)
    settings = offload_settings(config("tiny", *WORDS, *words))
    space = NodeSpace(mounts=[mount(10 * NEEDED)], others=(), headroom_bytes=8 * GIB)
    (problem,) = judge_fit(run.plan(settings), space, settings, run.plan).problems
    assert problem.fix == fix


def test_on_cpus_what_is_on_the_device_is_host_memory() -> None:
    words = (*WORDS, "device=cpu")
    run, settings = planner("tiny", *words), offload_settings(config("tiny", *words))
    node = run.plan().heaviest_node
    needed = node.staging_bytes + 4 * run.plan().heaviest.figures.device_bytes
    assert PLANNER.plan().host_bytes == node.staging_bytes < needed
    for free, fits in ((needed, True), (needed - 1, False)):
        space = NodeSpace(mounts=[mount(10 * NEEDED)], others=(), headroom_bytes=free)
        found = judge_fit(run.plan(), space, settings, run.plan)
        assert (found.fits, found.host_needed_bytes) == (fits, needed)


TWO = ("offload.directory=[/mnt/nvme0/state,/mnt/nvme1/state]",)
DIRECTORIES = planner("tiny", *WORDS, *TWO)


def fit_of_two(first: int, second: int, *, same: bool = False) -> Fit:
    mounts = [mount(first, "/mnt/nvme0"), mount(second, "/mnt/nvme1")]
    if same:
        mounts[1] = replace(mounts[1], device=mounts[0].device)
    space = NodeSpace(mounts=mounts, others=(), headroom_bytes=None)
    return judge_fit(DIRECTORIES.plan(), space, SETTINGS, DIRECTORIES.plan)


def test_each_filesystem_needs_room_for_its_own_ranks_alone() -> None:
    first, second = DIRECTORIES.plan().heaviest_node.by_directory(2)
    assert first + second == NEEDED
    assert fit_of_two(first, second).fits
    (problem,) = fit_of_two(first, second - 1).problems
    assert "/mnt/nvme1" in problem.what
    assert "/mnt/nvme0" not in problem.what


def test_two_directories_on_one_filesystem_need_their_sum() -> None:
    assert fit_of_two(NEEDED, NEEDED, same=True).fits
    (problem,) = fit_of_two(NEEDED - 1, NEEDED - 1, same=True).problems
    assert "(offload.directory=/mnt/nvme0/state, /mnt/nvme1/state)" in problem.what


def test_a_full_directory_is_left_out_only_if_the_others_hold_all() -> None:
    (problem,) = fit_of_two(NEEDED, 0).problems
    assert "offload.directory=/mnt/nvme0/state;" in problem.fix + ";"
    (problem,) = fit_of_two(NEEDED - 1, 0).problems
    assert "offload.directory=/mnt/nvme0/state" not in problem.fix


def test_a_cluster_is_judged_by_its_file() -> None:
    known = cluster_space(config("tiny", "cluster=h200_x8"))
    assert known.mounts[0].free_bytes == 8 * 3_840_000_000_000
    unknown = cluster_space(config("tiny", "cluster=local"))
    assert unknown.mounts == []
    assert judge_fit(PLANNER.plan(), unknown, SETTINGS, PLANNER.plan).fits
