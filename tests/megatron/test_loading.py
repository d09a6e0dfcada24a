"""What a load waits for: Megatron's reader, one rank, and state that is still on its way to disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import muon_offload_cli
from muon_offload_cli.checkpoints.names import step_folder
from muon_offload_cli.config.compose import compose
from muon_offload_cli.megatron.checkpoints import Checkpoints
from muon_offload_cli.megatron.observer import Observer
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.records import RankReport
from tests.checkpoints import forged
from tests.megatron.small_actor import Actor, build, one_rank

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:The argument order of load has been changed"),
]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with one_rank():
        yield


def described(actor: Actor, *, is_loading: bool) -> dict[str, Any]:
    model = actor.model.sharded_state_dict()
    return {"model": model, "optimizer": actor.optimizer.sharded_state_dict(model, is_loading=is_loading)}


@pytest.fixture
def saved(tmp_path: Path, directory: Path) -> tuple[Path, Actor]:
    """A sealed checkpoint of an actor after two steps, and the actor."""
    from megatron.core import dist_checkpointing

    folder = step_folder(tmp_path / "saved", 4)
    folder.mkdir(parents=True)
    actor = build(1)
    for _ in range(2):
        actor.step()
    dist_checkpointing.save(described(actor, is_loading=False), str(folder))
    forged.seal(folder, 4).write(folder)
    return folder, actor


@pytest.mark.parametrize("engine", ["host", "mapped", "disk"])
def test_weights_are_read_before_born_masters_are_waited_for_and_state_after_it(
    saved: tuple[Path, Actor], tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.training import training

    folder, before = saved
    waits: list[bool] = []

    def load() -> None:
        state = dist_checkpointing.load(described(actor, is_loading=True), str(folder))
        actor.optimizer.load_state_dict(state["optimizer"])

    monkeypatch.setattr(training, "load_checkpoint", load)
    config = compose("tiny", [f"resume={folder.parent}", "resume.step=4"]).config
    report, metrics = tmp_path / "report.json", tmp_path / "metrics.jsonl"
    observer = Observer(RankReport(rank=0), report, metrics, engine, None)
    installation = muon_offload_cli.install(directory=directory / "state", engine=engine, chunk_mb=0.01)
    with closing(observer), installation as installed:
        actor = build(2)
        (child,) = installed.optimizers
        synchronize = child.offloader.synchronize

        def watched() -> None:
            waits.append(all(map(torch.equal, actor.weights, before.weights)))
            synchronize()

        monkeypatch.setattr(child.offloader, "synchronize", watched)
        checkpoints = Checkpoints(config, observer)
        checkpoints.built(child)
        with Substitutions() as stack:
            checkpoints.watch(stack)
            training.load_checkpoint()
        assert waits == [True]
        # Who describes the state at any other time gets it as it is, and waits once.
        described(actor, is_loading=False)
        assert waits == [True, True]
        for each in (actor, before):
            each.step()
        assert all(map(torch.equal, actor.weights, before.weights))
        child.offloader.synchronize()
        masters = [
            [parameter.main_param.clone() for parameter in each.model.parameters()]
            for each in (actor, before)
        ]
        assert all(map(torch.equal, *masters))
