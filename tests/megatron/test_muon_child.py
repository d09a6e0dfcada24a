"""The Muon child beside Megatron's own wrapper, on one process: same arithmetic, other places.

torch's SGD stands for Muon: its state has the same key, and it needs no process groups. The whole way with
Muon itself is in tests/end_to_end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.cpu_device import cpu_device
from muon_offload_cli.megatron.late_gradients import LateGradient
from muon_offload_cli.megatron.muon_child import make_muon_child
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.offload.settings import OffloadSettings
from tests.fakes.drive import directory_on_a_drive

SHAPES = [(16, 8), (32, 16), (8, 8), (64, 4), (4, 4)]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cpu_device():
        yield


@pytest.fixture
def base() -> Any:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    return Float16OptimizerWithFloat16Params


@pytest.fixture
def settings(tmp_path: Path) -> OffloadSettings:
    return OffloadSettings(
        engine="disk",
        directories=(directory_on_a_drive(tmp_path) / "state",),
        chunk_bytes=4096,
        windows=2,
        staging_bytes=1 << 20,
    )


def make_model() -> list[torch.nn.Parameter]:
    """Weights of two groups, and one fp32 weight among them, as routers have."""
    generator = torch.Generator().manual_seed(3)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16)) for shape in SHAPES
    ]
    return [*parameters, torch.nn.Parameter(torch.randn(6, 6, generator=generator))]


def make_optimizer(parameters: list[torch.nn.Parameter], cls: type[Any] = torch.optim.SGD) -> Any:
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:4], "is_expert_parallel": True},
        {"params": parameters[4:], "lr": 0.3},
    ]
    return cls(groups, lr=0.2, momentum=0.9)


def make_config() -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(optimizer="sgd", bf16=True, lr=0.2, clip_grad=1.0)


def offloaded(base: Any, settings: OffloadSettings, parameters: list[torch.nn.Parameter]) -> Any:
    child = make_muon_child(base, (torch.optim.SGD,), lambda: settings, lambda _: None)
    return child(make_optimizer(parameters), make_config(), None, None)


def test_the_state_is_never_offloaded_twice(base: Any, settings: OffloadSettings) -> None:
    config = make_config()
    # Fields of Megatrons that bring an offloader of their own.
    config.chunked_optimizer_state_offload, config.optimizer_state_offload_fraction = True, 1.0
    child = make_muon_child(base, (torch.optim.SGD,), lambda: settings, lambda _: None)
    with pytest.raises(UserError, match="engine=disk moves the same state"):
        child(make_optimizer(make_model()), config, None, None)
    config.optimizer_state_offload_fraction = 0.0
    child(make_optimizer(make_model()), config, None, None).offloader.close()


def give_gradients(
    parameters: list[torch.nn.Parameter], seed: int, dtype: torch.dtype = torch.float32
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        # Of parameters that are fp32 themselves Megatron never reduces gradients in bf16.
        kept = dtype if parameter.dtype == torch.bfloat16 else torch.float32
        gradient = torch.randn(parameter.shape, generator=generator).to(kept)
        parameter.main_grad = gradient  # type: ignore[attr-defined]


def step(
    optimizer: Any, parameters: list[torch.nn.Parameter], seed: int, dtype: torch.dtype = torch.float32
) -> None:
    optimizer.zero_grad()
    give_gradients(parameters, seed, dtype)
    assert optimizer.prepare_grads() is False
    assert optimizer.step_with_ready_grads()


def masters_of(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.main_param for parameter in parameters[:-1]]  # type: ignore[attr-defined]


def test_weights_masters_and_momenta_are_those_of_the_resident_optimizer(
    base: Any, settings: OffloadSettings
) -> None:
    mine, theirs = make_model(), make_model()
    child = offloaded(base, settings, mine)
    resident = base(make_optimizer(theirs), make_config(), None, None)
    assert len(child.offloader.plan.chunks) > 3
    try:
        for seed in range(6):
            step(child, mine, seed)
            step(resident, theirs, seed)
            child.offloader.synchronize()
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b)
            for a, b in zip(masters_of(mine), masters_of(theirs), strict=True):
                assert torch.equal(a, b)
                momentum = child.optimizer.state[a]["momentum_buffer"]
                assert torch.equal(momentum, resident.optimizer.state[b]["momentum_buffer"])
        assert child.offloader.sweeps == 6
    finally:
        child.offloader.close()


def test_gradients_in_bf16_are_widened_as_their_chunk_is_stepped(
    base: Any, settings: OffloadSettings
) -> None:
    class Watching(torch.optim.SGD):
        """Notes how many of the masters have an fp32 gradient whenever some are stepped."""

        def step(self, *_: Any) -> None:
            wide.append(
                (
                    sum(
                        not isinstance(master.grad, LateGradient)
                        for master in masters_of(mine)
                        if master.grad is not None
                    ),
                    sum(len(group["params"]) for group in self.param_groups),
                )
            )
            super().step()

    wide: list[tuple[int, int]] = []
    mine, theirs = make_model(), make_model()
    child_of = make_muon_child(base, (Watching,), lambda: settings, lambda _: None)
    child = child_of(make_optimizer(mine, Watching), make_config(), None, None)
    resident = base(make_optimizer(theirs), make_config(), None, None)
    try:
        for seed in range(3):
            step(child, mine, seed, torch.bfloat16)
            step(resident, theirs, seed, torch.bfloat16)
        child.offloader.synchronize()
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
        chunks = len(child.offloader.plan.chunks)
        # At the end of a step comes the parameter that is fp32 itself and has no master.
        assert [stepped for seen, stepped in wide if not seen] == [1] * 3
        assert len([1 for seen, stepped in wide if seen == stepped]) == 3 * chunks == len(wide) - 3
    finally:
        child.offloader.close()


@pytest.mark.parametrize("fraction", [0.4, 0.7])
def test_lists_that_megatron_pairs_by_position_keep_the_optimizers_order(
    base: Any, settings: OffloadSettings, fraction: float
) -> None:
    mine = make_model()
    child = offloaded(base, replace(settings, fraction=fraction), mine)
    try:
        assert child.offloader.plan.of_tier(Tier.GPU)
        halves = [parameter for parameter in mine if parameter.dtype is torch.bfloat16]
        assert [id(p) for group in child.float16_groups for p in group] == [id(p) for p in halves]
        masters = [id(p.main_param) for p in halves]  # type: ignore[attr-defined]
        assert [id(p) for group in child.fp32_from_float16_groups for p in group] == masters
        stepped = [id(p) for group in child.optimizer.param_groups for p in group["params"]]
        assert stepped == [*masters, id(mine[-1])]
    finally:
        child.offloader.close()


def test_parameter_groups_look_as_if_nothing_were_offloaded(base: Any, settings: OffloadSettings) -> None:
    mine, theirs = make_model(), make_model()
    child = offloaded(base, settings, mine)
    resident = base(make_optimizer(theirs), make_config(), None, None)
    try:
        for ours, wanted in zip(child.optimizer.param_groups, resident.optimizer.param_groups, strict=True):
            assert [p.shape for p in ours["params"]] == [p.shape for p in wanted["params"]]
            assert [p.dtype for p in ours["params"]] == [p.dtype for p in wanted["params"]]
        for name in ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"):
            shapes = [[p.shape for p in group] for group in getattr(child, name)]
            assert shapes == [[p.shape for p in group] for group in getattr(resident, name)]
        assert [p.shape for p in child.get_parameters()] == [p.shape for p in resident.get_parameters()]
    finally:
        child.offloader.close()


def test_masters_keep_their_identity_and_show_their_values_between_steps(
    base: Any, settings: OffloadSettings
) -> None:
    parameters = make_model()
    child = offloaded(base, settings, parameters)
    try:
        before = masters_of(parameters)
        child.offloader.synchronize()
        for master, parameter in zip(before, parameters, strict=False):
            assert torch.equal(master, parameter.float())
        for seed in range(2):
            step(child, parameters, seed)
        after = masters_of(parameters)
        assert all(a is b for a, b in zip(before, after, strict=True))
        child.offloader.synchronize()
        for master, parameter in zip(after, parameters, strict=False):
            assert torch.equal(master.to(torch.bfloat16), parameter)
            assert master.grad is None
    finally:
        child.offloader.close()


def test_a_read_of_masters_while_gradients_are_ready_shows_nan(base: Any, settings: OffloadSettings) -> None:
    parameters = make_model()
    child = offloaded(base, settings, parameters)
    try:
        give_gradients(parameters, 1)
        child.prepare_grads()
        for master in masters_of(parameters):
            assert master.isnan().all()
            assert master.untyped_storage().nbytes() == 4
        # Gradients are there all the same, for their norm and its clipping.
        assert all(master.grad is not None and master.grad.norm() > 0 for master in masters_of(parameters))
        child.step_with_ready_grads()
        child.offloader.synchronize()
        assert not any(master.isnan().any() for master in masters_of(parameters))
    finally:
        child.offloader.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_is_prepared_and_not_taken_leaves_the_state_as_it_was(
    base: Any, settings: OffloadSettings, dtype: torch.dtype
) -> None:
    class Watching(base):  # type: ignore[misc]
        """Notes what masters a loaded state is copied to."""

        def load_state_dict(self, state_dict: Any) -> None:
            assert state_dict == {}
            saved.append([each.clone() for group in self.fp32_from_float16_groups for each in group])

    saved: list[list[torch.Tensor]] = []
    parameters = make_model()
    child = offloaded(Watching, settings, parameters)
    try:
        step(child, parameters, 0)
        child.offloader.synchronize()
        before = [master.detach().clone() for master in masters_of(parameters)]
        for forget in (
            lambda: child.zero_grad(set_to_none=False),
            lambda: None,
            lambda: child.load_state_dict({}),
        ):
            give_gradients(parameters, 1, dtype)
            assert child.prepare_grads() is False
            forget()
            saved.append([each for group in child.state_dict()["fp32_from_fp16_params"] for each in group])
            assert all(all(map(torch.equal, each, before)) for each in saved)
            child.zero_grad()
            assert all(map(torch.equal, masters_of(parameters), before))
        # A state that is read between the two does not stop the step.
        give_gradients(parameters, 1, dtype)
        child.prepare_grads()
        child.state_dict()
        assert len(saved) == 4
        assert child.step_with_ready_grads()
        child.offloader.synchronize()
        assert not any(map(torch.equal, masters_of(parameters), before))
    finally:
        child.offloader.close()


def test_masters_are_born_chunk_by_chunk(base: Any, settings: OffloadSettings) -> None:
    alive: list[int] = []

    class Watching(base):  # type: ignore[misc]
        """Counts the fp32 bytes of masters whenever the base class has built some."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            masters = [p.main_param for p in parameters if hasattr(p, "main_param")]
            alive.append(
                sum(m.untyped_storage().nbytes() for m in masters if m.untyped_storage().nbytes() > 4)
            )

    parameters = make_model()
    child = make_muon_child(Watching, (torch.optim.SGD,), lambda: settings, lambda _: None)
    built = child(make_optimizer(parameters), make_config(), None, None)
    try:
        chunks = built.offloader.plan.chunks
        assert len(alive) == len(chunks) + 1
        assert max(alive) <= max(chunk.nbytes for chunk in chunks)
        assert max(alive) < sum(4 * p.numel() for p in parameters[:-1])
    finally:
        built.offloader.close()


def test_masters_are_refreshed_from_changed_weights(base: Any, settings: OffloadSettings) -> None:
    parameters = make_model()
    child = offloaded(base, settings, parameters)
    try:
        step(child, parameters, 0)
        child.offloader.synchronize()
        momenta = [child.optimizer.state[m]["momentum_buffer"].clone() for m in masters_of(parameters)]
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(0.25)
        child.reload_model_params()
        child.offloader.synchronize()
        for master, momentum in zip(masters_of(parameters), momenta, strict=True):
            assert torch.equal(master, torch.full_like(master, 0.25))
            assert torch.equal(child.optimizer.state[master]["momentum_buffer"], momentum)
    finally:
        child.offloader.close()


def test_tiers_are_used_as_told(base: Any, settings: OffloadSettings) -> None:
    given = replace(settings, fraction=0.7, host_bytes=5000)
    mine, theirs = make_model(), make_model()
    child = offloaded(base, given, mine)
    resident = base(make_optimizer(theirs), make_config(), None, None)
    try:
        assert all(child.offloader.stored_bytes(tier) for tier in Tier)
        for seed in range(4):
            step(child, mine, seed)
            step(resident, theirs, seed)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
    finally:
        child.offloader.close()


def test_optimizers_of_another_class_and_empty_ones_become_the_plain_base(
    base: Any, settings: OffloadSettings
) -> None:
    taken: list[Any] = []
    child = make_muon_child(base, (torch.optim.SGD,), lambda: settings, taken.append)

    class OtherSgd(torch.optim.SGD):
        """A subclass may keep other state, so it is not taken over."""

    for optimizer in (make_optimizer(make_model(), OtherSgd), torch.optim.Adam(make_model())):
        assert type(child(optimizer, make_config(), None, None)) is base
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    assert type(child(empty, make_config(), None, None)) is base
    assert taken == []


def test_an_optimizer_without_float16_weights_becomes_the_plain_base(
    base: Any, settings: OffloadSettings
) -> None:
    child = make_muon_child(base, (torch.optim.SGD,), lambda: settings, lambda _: None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1, momentum=0.9)
    assert type(child(optimizer, make_config(), None, None)) is base


def test_moving_the_state_by_hand_is_refused_with_a_fix(base: Any, settings: OffloadSettings) -> None:
    child = offloaded(base, settings, make_model())
    try:
        for move in (child.offload_to_cpu, child.restore_from_cpu):
            with pytest.raises(UserError, match=r"offload_to_cpu\(\) or restore_from_cpu\(\)") as caught:
                move()
            assert caught.value.problems[0].fix == "offload.engine=none"
    finally:
        child.offloader.close()


def test_a_directory_that_cannot_be_used_is_a_user_error(base: Any, settings: OffloadSettings) -> None:
    given = replace(settings, directories=(Path("/proc/nothing/here"),))
    with pytest.raises(UserError):
        offloaded(base, given, make_model())
