"""Counting the steps of a program that does not train through Megatron's loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.attach import install
from muon_offload_cli.megatron.loops import LoopListener
from muon_offload_cli.megatron.observer import Observer
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.records import RankReport, StepRecord
from tests.fakes.drive import directory_on_a_drive
from tests.megatron.small_actor import STATE_BYTES, build, one_rank


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Observer]:
    """An observer of a script in a process where Muon's state goes to disk."""
    settings = OffloadSettings(
        engine="disk", directories=(directory_on_a_drive(tmp_path) / "state",), chunk_bytes=8192
    )
    made = Observer(
        RankReport(rank=0), tmp_path / "report.json", tmp_path / "metrics.jsonl", "disk", "mine.py"
    )
    with Substitutions() as stack:
        LoopListener(made, stack)
        stack.enter_context(install(settings, made.built))
        yield made
    made.close()


def records(tmp_path: Path) -> list[StepRecord]:
    return [StepRecord.from_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_each_step_of_the_first_optimizer_that_steps_is_a_step(tmp_path: Path, observer: Observer) -> None:
    policy, critic = build(1), build(2)
    for actor in (policy, critic, critic, policy):
        actor.step()
    observer.finish(digest=False)
    report = RankReport.read(tmp_path / "report.json")
    assert (report.steps, report.last_step, report.finished) == (2, 2, True)
    assert (report.engine, report.disk_bytes) == ("disk", 2 * STATE_BYTES)
    seen = records(tmp_path)
    assert [(record.step, record.engine, record.loss) for record in seen] == [
        (1, "disk", None),
        (2, "disk", None),
    ]
    assert all(record.grad_norm and record.learning_rate == 0.01 for record in seen)


def test_a_loop_that_logs_as_megatron_does_is_counted_once(
    tmp_path: Path, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import training

    policy = build()
    for step in (1, 2, 3):
        policy.step()
        with pytest.raises(AssertionError, match="args is not initialized"):
            # The real one goes on to Megatron's globals, which this program never made.
            training.training_log(
                {"lm loss": torch.tensor(2.0)}, {}, 0.1, step, 1.0, False, 0, 1.5, None, 0, None
            )
    assert [(record.step, record.loss) for record in records(tmp_path)] == [(1, None), (2, 2.0), (3, 2.0)]


def test_an_optimizer_without_layer_wise_muon_stops_the_script_at_its_first_step(observer: Observer) -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    with pytest.raises(UserError, match=r"mine\.py built an optimizer without layer-wise Muon"):
        ChainedOptimizer([]).step()
