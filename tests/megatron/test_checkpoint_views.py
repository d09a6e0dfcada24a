"""What Megatron's checkpointing is shown of state in host memory."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from muon_offload_cli.megatron.checkpoint_views import UnpinnedView, checkpoint_views
from tests.megatron.small_actor import one_rank


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
    view = shown["state"][0].data
    for tensor in [view, view.detach(), view.view(1, 2, 3), *(p.data for p in shown["fc1"].build())]:
        assert not tensor.is_pinned()
    assert matrix.is_pinned()
    assert view.data_ptr() == matrix.data_ptr()


def test_layers_in_different_tiers_are_one_tensor_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import sharded_tensor_to_torch_sharded_tensor

    layers = [torch.full((2, 3), float(number)) for number in range(2)]
    locked = layers[0].data_ptr()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: tensor.data_ptr() == locked)

    def parts() -> list[Any]:
        return [
            ShardedTensor.from_rank_offsets("layers.weight", layer, (0, number, 2), prepend_axis_num=1)
            for number, layer in enumerate(layers)
        ]

    with one_rank():
        with pytest.raises(ValueError, match="pin_memory property is incompatible"):
            sharded_tensor_to_torch_sharded_tensor(parts())
        whole = sharded_tensor_to_torch_sharded_tensor(checkpoint_views(parts()))
        shown = [shard.tensor.data_ptr() for shard in whole.local_shards()]
        assert shown == [layer.data_ptr() for layer in layers]


def test_what_is_written_of_a_view_is_a_plain_tensor() -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(4.0).as_subclass(UnpinnedView), stream)
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
