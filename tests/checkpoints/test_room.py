"""How many checkpoints come to stand at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.checkpoints.room import Coming

COUNTS = st.integers(0, 12)


@given(
    steps=st.integers(1, 60), begin=COUNTS, interval=COUNTS, keep=st.none() | st.integers(1, 5), there=COUNTS
)
def test_no_more_and_no_fewer_stand_at_once_than_in_a_run(
    steps: int, begin: int, interval: int, keep: int | None, there: int
) -> None:
    steps += begin
    standing = most = there
    for step in range(begin + 1, steps + 1):
        if step == steps or (interval and step % interval == 0):
            standing += 1
            most = max(most, standing)
            standing = standing if keep is None else min(standing, keep)
    coming = Coming.of(steps=steps, interval=interval, begin=begin, standing=there)
    assert coming.more(keep) == most - there


@given(saves=st.integers(1, 12), standing=COUNTS, room=COUNTS)
def test_the_keep_that_is_advised_is_the_largest_that_fits(saves: int, standing: int, room: int) -> None:
    def fits(keep: int) -> bool:
        return max(1, keep + 1 - standing) <= room

    advised = Coming(saves=saves, standing=standing).keep_within(room)
    assert advised == max((keep for keep in range(1, 40) if fits(keep)), default=None)
