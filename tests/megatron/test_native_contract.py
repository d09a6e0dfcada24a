"""Installing over Megatron's own offloader: what is refused, and what configs and the other engines get."""

from __future__ import annotations

import re
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron import native_contract
from muon_offload_cli.megatron.attach import Installation, install
from muon_offload_cli.offload.settings import OffloadSettings
from tests.fakes.native_offloader import stand_in

CLASS = native_contract.CLASS


@pytest.mark.parametrize(
    ("attribute", "value", "told"),
    [
        ("_new_cpu_buffer", None, f"{CLASS}._new_cpu_buffer(tensor)"),
        ("_new_cpu_buffer", staticmethod(lambda tensor, device: tensor), "_new_cpu_buffer(tensor): it is "),
        ("adopt_cpu_optimizer_state", lambda self: None, "adopt_cpu_optimizer_state allocating through "),
        ("step", lambda self, closure: None, f"{CLASS}.step(): it is "),
        ("synchronize_for_checkpoint", None, f"{CLASS}.synchronize_for_checkpoint()"),
    ],
)
def test_a_changed_method_is_refused_before_anything_is_replaced(
    attribute: str, value: Any, told: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defining, building = stand_in(monkeypatch)
    setattr(getattr(defining, CLASS), attribute, value)
    assert_refused(told, directory, (defining, building))


def test_a_renamed_class_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defining, building = stand_in(monkeypatch)
    delattr(defining, CLASS)
    assert_refused(f"chunked_optimizer_state_offload.{CLASS}", directory, (defining, building))


def test_a_builder_that_uses_another_class_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defining, building = stand_in(monkeypatch)
    monkeypatch.setattr(building, CLASS, type("Other", (), {}))
    assert_refused(f"megatron.core.optimizer.optimizer.{CLASS}", directory, (defining, building))


def test_a_config_without_the_fields_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import optimizer_config

    modules = stand_in(monkeypatch)
    config = make_dataclass("OptimizerConfig", ["optimizer", "chunked_optimizer_state_offload"])
    monkeypatch.setattr(optimizer_config, "OptimizerConfig", config)
    assert_refused("OptimizerConfig.optimizer_state_offload_fraction", directory, modules)


def assert_refused(told: str, directory: Path, modules: tuple[Any, Any]) -> None:
    before = [getattr(module, CLASS, None) for module in modules]
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        install(OffloadSettings(engine="mapped", directories=(directory,)))
    assert caught.value.problems[0].fix == "offload.engine=disk"
    assert [getattr(module, CLASS, None) for module in modules] == before


def test_a_config_that_asks_for_no_offload_is_given_our_settings(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer import optimizer_config

    stand_in(monkeypatch)
    settings = OffloadSettings(engine="mapped", directories=(directory,), chunk_bytes=3 << 19, fraction=0.5)
    with install(settings):
        given = optimizer_config.OptimizerConfig(optimizer="muon")
        assert given.chunked_optimizer_state_offload
        assert (given.optimizer_state_offload_chunk_size_mb, given.optimizer_state_offload_fraction) == (
            2,
            0.5,
        )
        own = optimizer_config.OptimizerConfig(
            optimizer="muon", chunked_optimizer_state_offload=True, optimizer_state_offload_chunk_size_mb=7
        )
        assert (own.optimizer_state_offload_chunk_size_mb, own.optimizer_state_offload_fraction) == (7, 1.0)
        assert not optimizer_config.OptimizerConfig(optimizer="adam").chunked_optimizer_state_offload
    assert not optimizer_config.OptimizerConfig(optimizer="muon").chunked_optimizer_state_offload


@pytest.mark.parametrize("engine", ["disk", "host"])
def test_the_other_engines_are_our_own_there_too(
    engine: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defining, _ = stand_in(monkeypatch)
    base = getattr(defining, CLASS)
    with install(OffloadSettings(engine=engine, directories=(directory,))) as installation:
        assert isinstance(installation, Installation)
        assert getattr(defining, CLASS) is base
