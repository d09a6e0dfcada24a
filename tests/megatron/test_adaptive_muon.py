"""Adaptive Muon with its state in the offloader's tiers, beside the same optimizer resident.

The way through a whole run and its checkpoints is in tests/end_to_end/test_resume.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron import probe, state_census
from muon_offload_cli.megatron.cpu_device import cpu_device
from muon_offload_cli.megatron.muon_child import make_muon_child
from muon_offload_cli.megatron.muon_state import second_moment_shape
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.offload.settings import OffloadSettings
from tests.fakes.adaptive_muon import adaptive_muon_with_its_scale
from tests.fakes.drive import directory_on_a_drive

# As Megatron tells groups apart when it loads them.
GROUPS = [{"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": expert} for expert in (False, True)]
SHAPES = [(16, 8), (32, 16), (8, 24), (64, 4), (4, 4)]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cpu_device():
        yield


@pytest.fixture
def buildable() -> type[Any]:
    return adaptive_muon_with_its_scale()


@pytest.fixture
def settings(tmp_path: Path) -> OffloadSettings:
    return OffloadSettings(
        engine="disk",
        directories=(directory_on_a_drive(tmp_path) / "state",),
        chunk_bytes=8192,
        windows=2,
        staging_bytes=1 << 20,
    )


class Pair:
    """The same weights under the same optimizer, `mine` offloaded and `theirs` resident."""

    def __init__(self, cls: type[Any], method: str, settings: OffloadSettings) -> None:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Base

        config = OptimizerConfig(optimizer="adaptive_muon", bf16=True, lr=0.02, clip_grad=1.0)
        self.weights = [make_weights(), make_weights()]
        self.torch_optimizers = [
            cls([{"params": w[:2], **GROUPS[0]}, {"params": w[2:], **GROUPS[1]}], moment2_method=method)
            for w in self.weights
        ]
        self.mine = make_muon_child(Base, (cls,), lambda: settings, lambda _: None)(
            self.torch_optimizers[0], config, None, None
        )
        self.theirs = Base(self.torch_optimizers[1], config, None, None)

    def step(self, seed: int) -> None:
        for optimizer, weights in zip((self.mine, self.theirs), self.weights, strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(seed)
            for weight in weights:
                weight.main_grad = torch.randn(weight.shape, generator=generator)  # type: ignore[attr-defined]
            assert optimizer.prepare_grads() is False
            assert optimizer.step_with_ready_grads()
        self.mine.offloader.synchronize()

    def assert_equal(self) -> None:
        for own, wanted in zip(*self.weights, strict=True):
            assert torch.equal(own, wanted)
            a, b = own.main_param, wanted.main_param  # type: ignore[attr-defined]
            assert torch.equal(a, b)
            mine, theirs = self.mine.optimizer.state[a], self.theirs.optimizer.state[b]
            assert set(mine) == set(theirs) == {"momentum_buffer", "moment2_buffer"}
            for key, value in mine.items():
                assert value.shape == theirs[key].shape
                assert torch.equal(value, theirs[key])
            assert theirs["moment2_buffer"].any()


def make_weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16)) for shape in SHAPES
    ]


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_weights_masters_and_both_moments_are_those_of_the_resident_optimizer(
    buildable: Any, settings: OffloadSettings, method: str
) -> None:
    pair = Pair(buildable, method, replace(settings, fraction=0.8, host_bytes=9000))
    try:
        assert all(pair.mine.offloader.stored_bytes(tier) for tier in Tier)
        for seed in range(4):
            pair.step(seed)
            pair.assert_equal()
    finally:
        pair.mine.offloader.close()


@pytest.mark.parametrize(
    ("method", "shape", "moment"),
    [
        ("adamuon", (16, 8), (16, 8)),
        ("normuon", (16, 8), (16, 1)),
        ("normuon", (8, 24), (1, 24)),
        ("namo", (16, 8), (1,)),
    ],
)
def test_the_optimizer_itself_says_what_it_keeps(
    buildable: Any, method: str, shape: tuple[int, ...], moment: tuple[int, ...]
) -> None:
    optimizer = buildable([torch.nn.Parameter(torch.zeros(4, 4))], moment2_method=method)
    assert second_moment_shape(optimizer, torch.empty(shape)) == moment
    assert not optimizer.state
    assert second_moment_shape(torch.optim.SGD([torch.zeros(1)]), torch.empty(shape)) is None


def test_state_of_another_kind_is_refused() -> None:
    class Other:
        moment2_method = "other"
        state: dict[Any, Any]

        def __init__(self) -> None:
            self.state = {}

        def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool) -> None:
            self.state[group["params"][0]] = {"momentum_buffer": 1, "third_buffer": 2}

    with pytest.raises(UserError, match="keeps momentum_buffer, third_buffer"):
        second_moment_shape(Other(), torch.empty(2, 2))


def test_a_loaded_state_goes_on_as_the_saved_one(buildable: Any, settings: OffloadSettings) -> None:
    saved, other = Pair(buildable, "adamuon", settings), Pair(buildable, "adamuon", settings)
    try:
        saved.step(1)
        state = copy.deepcopy(saved.mine.state_dict())
        other.step(7)
        for optimizer in (other.mine, other.theirs):
            optimizer.load_state_dict(copy.deepcopy(state))
        saved.step(2)
        # Weights follow masters from the next step on.
        other.step(2)
        other.assert_equal()
        for a, b in zip(saved.weights[0], other.weights[0], strict=True):
            assert torch.equal(a, b)
    finally:
        saved.mine.offloader.close()
        other.mine.offloader.close()


def test_the_census_counts_and_hashes_second_moments(buildable: Any, settings: OffloadSettings) -> None:
    pair = Pair(buildable, "adamuon", settings)
    try:
        elements = sum(weight.numel() for weight in pair.weights[0])
        assert (
            state_census.muon_state_bytes(pair.mine)
            == state_census.muon_state_bytes(pair.theirs)
            == 12 * elements
        )
        taken = sum(chunk.state_bytes for chunk in pair.mine.offloader.plan.chunks)
        assert taken == 12 * elements
        pair.step(1)
        models = [
            SimpleNamespace(
                named_parameters=lambda weights=weights: [(str(i), w) for i, w in enumerate(weights)]
            )
            for weights in pair.weights
        ]
        mine, theirs = (
            state_census.digests([model], optimizer)  # type: ignore[list-item]
            for model, optimizer in zip(models, (pair.mine, pair.theirs), strict=True)
        )
        assert mine == theirs
        assert set(mine) == {"weights", "masters", "momenta", "second_moments"}
        assert len(set(mine.values())) == 4
    finally:
        pair.mine.offloader.close()


def test_the_probe_steps_what_can_be_stepped_and_says_why_not_otherwise(buildable: Any) -> None:
    assert probe._adaptive_muon(SimpleNamespace(TensorParallelAdaptiveMuon=buildable)) == ""  # type: ignore[arg-type]
    assert probe._adaptive_muon(SimpleNamespace()) == "this Megatron has no adaptive Muon"  # type: ignore[arg-type]
    from megatron.core.optimizer import emerging_optimizers

    reason = probe._adaptive_muon(emerging_optimizers)
    assert reason is not None
    # Either it works by now, or the reason is the one that the fake makes up for.
    assert reason == "" or "scale_mode" in reason
