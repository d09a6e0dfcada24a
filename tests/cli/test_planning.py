"""What commands assume of a plan: layers, and the host memory that ``auto`` takes."""

from __future__ import annotations

import pytest

from muon_offload_cli.cli import planning
from muon_offload_cli.cli.prepare import judge
from muon_offload_cli.units import GIB
from tests.planner.plans import config


def test_transformer_engine_is_looked_for_only_where_a_gpu_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: object())
    run_config = config("tiny")
    assert planning.layers_of(run_config) is planning.Layers.LOCAL
    run_config.device = planning.Device.cuda
    assert planning.layers_of(run_config) is planning.Layers.TRANSFORMER_ENGINE
    run_config.megatron.args["transformer-impl"] = "local"
    assert planning.layers_of(run_config) is planning.Layers.LOCAL


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_auto_leaves_ranks_on_cpus_what_the_rules_count_for_want_of_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(planning.memory, "inspect", lambda *_: planning.memory.of_size(80 * GIB))
    monkeypatch.setattr("muon_offload_cli.cli.prepare.gpu_count", lambda: 0)
    words = ["recipe=qwen3_4b", "cluster=local", f"device={device}", "offload.host_memory_gb=auto"]
    judged = judge(words, [], here=False)
    assert 0 < (judged.config.offload.host_memory_gib or 0) < 10
    assert "host-headroom" not in {problem.rule for problem in judged.problems}
