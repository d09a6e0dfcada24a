from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.storage.extent import ALIGNMENT, Extent, lay_out, pieces, within

sizes = st.lists(st.integers(0, 1 << 40), max_size=50)
aligned = st.integers(1, 1 << 12).map(lambda count: count * ALIGNMENT)


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


@given(st.integers(0, 1 << 24), st.integers(0, 1 << 20), aligned)
def test_pieces_cover_an_extent_in_order_and_begin_aligned(nbytes: int, page: int, piece_bytes: int) -> None:
    extent = Extent(page * ALIGNMENT, nbytes)
    end = 0
    for piece in pieces(extent, piece_bytes):
        assert piece.offset == end
        assert 0 < piece.nbytes <= piece_bytes
        assert within(extent, piece) == Extent(extent.offset + piece.offset, piece.nbytes)
        assert within(extent, piece).offset % ALIGNMENT == 0
        end = piece.end
    assert end == nbytes


@pytest.mark.parametrize("piece_bytes", [0, -ALIGNMENT, ALIGNMENT - 1, ALIGNMENT + 512])
def test_pieces_that_would_begin_unaligned_are_refused(piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="piece_bytes"):
        pieces(Extent(0, ALIGNMENT), piece_bytes)


def test_a_piece_outside_its_extent_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond"):
        within(Extent(0, ALIGNMENT), Extent(ALIGNMENT, 1))


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 0), (0, -1)])
def test_negative_extents_are_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        Extent(offset, nbytes)


def test_a_negative_size_cannot_be_laid_out() -> None:
    with pytest.raises(ValueError, match="negative"):
        lay_out([ALIGNMENT, -2 * ALIGNMENT])
