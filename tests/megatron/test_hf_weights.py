"""Loading through a stand-in for Megatron-Bridge: what it leaves out is found, what it says is passed on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from muon_offload_cli.config.compose import compose
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.hf_weights import load_weights, watch_for_weights
from muon_offload_cli.megatron.substitute import Substitutions


class Bridge:
    """Fills every parameter but those named in `leaves`."""

    leaves: ClassVar[tuple[str, ...]] = ()
    seen: ClassVar[list[Any]] = []
    trusted: ClassVar[bool | None] = None

    @classmethod
    def from_hf_pretrained(cls, folder: str, *, trust_remote_code: bool) -> Bridge:
        if not (Path(folder) / "model.safetensors").exists():
            raise ValueError("Failed to load\nmore lines")
        cls.trusted = trust_remote_code
        return cls()

    def load_hf_weights(self, models: list[Any]) -> None:
        Bridge.seen = models
        for model in models:
            for name, values in [*model.named_parameters(), *model.named_buffers()]:
                if name not in self.leaves:
                    values.data.fill_(2.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = ModuleType("megatron.bridge")
    module.AutoBridge = Bridge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    monkeypatch.setattr(Bridge, "leaves", ())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def make_model() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].register_buffer("expert_bias", torch.zeros(2))
    model[1].register_buffer("counts", torch.zeros(2))
    model.config = SimpleNamespace()  # type: ignore[assignment]
    return model


def test_every_parameter_gets_its_weight(folder: Path) -> None:
    model = make_model()
    load_weights([model], folder, tied=True)
    assert all(bool((values == 2).all()) for values in model.parameters())
    assert model.config.share_embeddings_and_output_weights
    assert Bridge.trusted is False


@pytest.mark.parametrize("name", ["0.weight", "1.expert_bias"])
def test_a_parameter_that_the_bridge_leaves_out_stops_the_run(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bridge, "leaves", (name, "1.counts"))
    with pytest.raises(UserError, match=f"no weight came for {name}. ") as caught:
        load_weights([make_model()], folder, tied=False)
    assert "model.hf_weights=false" in caught.value.problems[0].fix


def test_a_language_model_stands_where_the_bridge_of_a_seeing_model_looks(folder: Path) -> None:
    described = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(described))
    model = make_model()
    load_weights([model], folder, tied=False, trust_remote_code=True)
    (seen,) = Bridge.seen
    assert next(name for name, _ in seen.named_parameters()) == "language_model.0.weight"
    assert seen.language_model is model
    assert seen.config is model.config
    assert Bridge.trusted


def test_what_the_bridge_refuses_is_told_in_one_line(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"Megatron-Bridge cannot load it: Failed to load\.$"):
        load_weights([make_model()], folder, tied=False)


@pytest.mark.parametrize(
    ("words", "loads"),
    [
        ([], True),
        (["model.hf_weights=false"], False),
        (["resume=/old/run", "resume.step=7"], False),
    ],
)
def test_weights_are_loaded_before_the_optimizer_is_built_unless_a_checkpoint_has_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], loads: bool
) -> None:
    from megatron.training import training

    model, order = make_model(), []
    monkeypatch.setattr(training, "get_args", SimpleNamespace)
    monkeypatch.setattr(
        training,
        "get_megatron_optimizer",
        lambda settings, chunks: order.append(chunks[0][0].weight.sum().item()),
    )
    published = Path(__file__).parents[1] / "config" / "hf" / "qwen3_4b" / "config.json"
    (folder / "config.json").write_text(published.read_text())
    config = compose("qwen3_4b", [f"model.from_hf={folder}", *words]).config
    with Substitutions() as stack:
        watch_for_weights(config, stack)
        training.get_megatron_optimizer(None, [model])
    training.get_megatron_optimizer(None, [model])
    assert (order[0] == 8.0) == loads
    assert order[1] == order[0]


def test_a_bridge_that_is_missing_is_told_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(UserError, match="Megatron-Bridge cannot be imported") as caught:
        load_weights([make_model()], tmp_path, tied=False)
    assert caught.value.problems[0].fix.startswith("pip install megatron-bridge")
