"""The legs of a rehearsal, and what is found between them."""

from __future__ import annotations

from pathlib import Path

from muon_offload_cli.config.compose import compose
from muon_offload_cli.launch.legs import (
    KILL_AT,
    SAVE_EVERY,
    differences,
    killed_leg,
    resumed_leg,
    shortfalls,
    straight_leg,
)
from muon_offload_cli.records import RankReport

SCRATCH = Path("/scratch")
CONFIG = compose(
    "tiny", ["checkpoint.directory=/shared/real", "offload.directory=/nvme", "resume.source=/old"]
).config


def reports(**changes: object) -> dict[int, RankReport]:
    made = {}
    for rank in range(4):
        made[rank] = RankReport(
            rank=rank,
            engine="disk",
            muon_parameters=1,
            steps=4,
            steps_from_backend=4,
            finished=True,
            digests={"weights": f"w{rank}", "momenta": "m"},
        )
    for key, value in changes.items():
        setattr(made[2], key, value)
    return made


def test_no_leg_touches_the_folders_of_the_real_run() -> None:
    for leg in (straight_leg, killed_leg, resumed_leg):
        made = leg(CONFIG, SCRATCH)
        places = (
            made.run.directory,
            *(made.offload.directory or [""]),
            made.checkpoint.directory or "/scratch",
            made.resume.source or "/scratch",
        )
        assert all(str(place).startswith("/scratch") for place in places)
        assert made.run.digest


def test_a_leg_has_as_many_state_folders_as_the_real_run() -> None:
    config = compose("tiny", ["offload.directory=[/nvme0/a,/nvme1/a]"]).config
    assert straight_leg(config, SCRATCH).offload.directory == ["/scratch/state_0", "/scratch/state_1"]


def test_the_killed_leg_has_saved_before_it_dies_and_the_resumed_one_starts_there() -> None:
    assert SAVE_EVERY < KILL_AT
    killed = killed_leg(CONFIG, SCRATCH)
    assert killed.checkpoint.interval == SAVE_EVERY
    resumed = resumed_leg(CONFIG, SCRATCH).resume
    # Also if the killed one got further before it died.
    assert (resumed.source, resumed.step) == (killed.checkpoint.directory, SAVE_EVERY)
    assert straight_leg(CONFIG, SCRATCH).resume.source is None


def test_ranks_that_did_all_that_was_asked_for_have_no_shortfall() -> None:
    assert shortfalls(CONFIG, reports(), steps=4) == []


def test_a_shortfall_names_its_rank() -> None:
    assert shortfalls(CONFIG, reports(finished=False), steps=4) == ["rank 2 did not finish"]
    assert shortfalls(CONFIG, reports(steps=3), steps=4) == ["rank 2 took 3 of 4 steps"]
    assert shortfalls(CONFIG, reports(engine="none"), steps=4) == ["rank 2 kept its state in none"]
    assert shortfalls(CONFIG, reports(steps_from_backend=1), steps=4) == [
        "rank 2 took 1 of 4 steps from the engine"
    ]
    assert shortfalls(CONFIG, {0: reports()[0]}, steps=4)[0] == "rank 1 did not finish"


def test_a_rank_without_a_matrix_of_its_own_moves_nothing() -> None:
    assert shortfalls(CONFIG, reports(muon_parameters=0, steps_from_backend=0), steps=4) == []


def test_other_hashes_at_the_end_are_told_by_rank_and_kind() -> None:
    assert differences(reports(), reports()) == []
    other = reports(digests={"weights": "w2", "momenta": "other"})
    assert differences(reports(), other) == ["rank 2: momenta differ"]
    del other[2]
    assert differences(reports(), other) == ["rank 2: momenta differ", "rank 2: weights differ"]
