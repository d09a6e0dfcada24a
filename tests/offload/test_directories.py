"""All drives of a node get the same, however many ranks there are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.offload.directories import are_spread, bytes_by_directory, describe, directories_of
from muon_offload_cli.storage.stripes import MOST_STRIPE_BYTES

counts, ranks = st.integers(1, 8), st.integers(1, 16)


@given(counts, ranks, st.integers(0, 1 << 36).map(lambda size: size // 4096 * 4096))
def test_every_directory_gets_the_same_of_equal_ranks(count: int, ranks: int, size: int) -> None:
    shares = bytes_by_directory([size] * ranks, count)
    assert sum(shares) == ranks * size
    assert max(shares) - min(shares) <= ranks * MOST_STRIPE_BYTES * (not are_spread(count, ranks))


@given(counts, ranks)
def test_a_rank_has_one_directory_as_often_as_every_other_or_all_of_them(count: int, ranks: int) -> None:
    directories = [Path(f"/nvme{number}") for number in range(count)]
    used = [directories_of(directories, ranks=ranks, local_rank=rank) for rank in range(ranks)]
    if are_spread(count, ranks):
        flat = [directory for (directory,) in used]
        assert {flat.count(directory) for directory in directories} == {ranks // count}
    else:
        assert set(used) == {tuple(directories)}


def test_what_is_done_is_said() -> None:
    assert describe(1, 4) == describe(0, 4) == ""
    assert describe(2, 8) == "ranks are spread over 2 directories, 4 to each"
    assert describe(3, 4) == "each rank's file is striped over all 3 directories"
