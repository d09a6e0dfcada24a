"""What Megatron's checkpointing is shown of state in host memory."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from muon_offload_cli.megatron.checkpoint_views import HostView, checkpoint_views


@pytest.fixture
def page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch take all host memory for page-locked, as a host tier beside a GPU is."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda *_: True)


def sharded(key: str, tensor: torch.Tensor) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, tensor)


def halves(tensor: torch.Tensor) -> Any:
    """The factory of a matrix that is saved as two."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def build(key: str, whole: torch.Tensor, *_: Any) -> list[Any]:
        return [sharded(f"{key}_{name}", half) for name, half in zip("wv", whole.chunk(2), strict=True)]

    return ShardedTensorFactory("fc1", tensor, build, torch.cat)


def test_no_view_tells_that_its_memory_is_page_locked(page_locked: None) -> None:
    matrix = torch.arange(6.0).view(2, 3)
    shown = checkpoint_views({"state": [sharded("a", matrix)], "fc1": halves(torch.ones(4, 2))})
    (view,) = (each.data for each in shown["state"])
    for tensor in [view, view.detach(), view.view(1, 2, 3), *(p.data for p in shown["fc1"].build())]:
        assert not tensor.is_pinned()
    assert matrix.is_pinned()
    assert view.data_ptr() == matrix.data_ptr()


def test_what_is_written_of_a_view_is_a_plain_tensor() -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(4.0).as_subclass(HostView), stream)
    assert b"muon_offload" not in stream.getvalue()
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert type(loaded) is torch.Tensor
    assert loaded.tolist() == [0, 1, 2, 3]


def test_halves_have_storages_of_their_own_size_and_are_merged_in_place() -> None:
    whole = torch.zeros(4, 2)
    factory = checkpoint_views(halves(whole))
    parts = factory.build()
    assert [part.data.untyped_storage().nbytes() for part in parts] == [16, 16]
    for part in parts:
        part.data.fill_(3)
    assert factory.merge_fn([part.data for part in parts]) is whole
    assert whole.tolist() == [[3, 3]] * 4
    moved = [part.data.clone() for part in parts]
    assert torch.equal(factory.merge_fn(moved), whole)
    assert factory.merge_fn(moved) is not whole


def test_device_tensors_and_other_objects_are_left_alone() -> None:
    there = torch.zeros(2, 2, device="meta")
    shard, text = sharded("a", there), "text"
    shown = checkpoint_views({"a": shard, "b": text})
    assert shown["a"] is shard
    assert shown["b"] is text
