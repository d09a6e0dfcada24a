from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.storage.extent import ALIGNMENT, Extent, lay_out

sizes = st.lists(st.integers(0, 1 << 40), max_size=50)


@given(sizes)
def test_extents_are_aligned_hold_their_sizes_and_touch_without_overlap(sizes: list[int]) -> None:
    extents = lay_out(sizes)
    assert len(extents) == len(sizes)
    end = 0
    for size, extent in zip(sizes, extents, strict=True):
        assert extent.offset == end
        assert extent.offset % ALIGNMENT == extent.nbytes % ALIGNMENT == 0
        assert size <= extent.nbytes < size + ALIGNMENT
        end = extent.end


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 0), (0, -1)])
def test_negative_extents_are_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        Extent(offset, nbytes)


def test_a_negative_size_cannot_be_laid_out() -> None:
    with pytest.raises(ValueError, match="negative"):
        lay_out([ALIGNMENT, -2 * ALIGNMENT])
