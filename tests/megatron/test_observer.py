"""What a rank tells of its steps, over a stand-in training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muon_offload_cli.machine.numa import NearDevice
from muon_offload_cli.megatron.cpu_device import cpu_device
from muon_offload_cli.megatron.loops import LoopListener
from muon_offload_cli.megatron.observer import Observer
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.offload.offloader import StateOffloader, state_bytes
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.records import RankReport, StepRecord
from tests.fakes.drive import directory_on_a_drive
from tests.offload.rig import CPU, PARAMETERS, fill, settings, sweep


class Loop:
    """Stands for Megatron's training loop: calls what the observer listens to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
        from megatron.training import training

        self.module = training
        # Only its class and its parameters are looked at.
        muon = TensorParallelMuon.__new__(TensorParallelMuon)
        self.parameters = [torch.empty(spec.shape) for spec in PARAMETERS]
        muon.param_groups = [{"params": self.parameters}]
        self.logged: list[int] = []

        def training_log(
            loss_dict: Any, learning_rate: Any, iteration: int, skipped_iter: int, grad_norm: Any
        ) -> str:
            self.logged.append(iteration)
            return "logged"

        def setup_model_and_optimizer() -> Any:
            return [], SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=muon)]), None

        monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(iteration=0))
        monkeypatch.setattr(training, "training_log", training_log)
        monkeypatch.setattr(training, "setup_model_and_optimizer", setup_model_and_optimizer)

    def build(self) -> None:
        self.module.setup_model_and_optimizer()

    def step(self, number: int, loss: float | None = 2.5, skipped: int = 0) -> None:
        losses = {} if loss is None else {"lm loss": torch.tensor(loss)}
        assert self.module.training_log(losses, 0.1, number, skipped, grad_norm=1.5) == "logged"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    with cpu_device():
        yield Loop(monkeypatch)


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[StateOffloader]:
    given = settings(directory_on_a_drive(tmp_path) / "state", windows=2, host_bytes=20_000)
    made = StateOffloader(PARAMETERS, given, CPU, near_device=NearDevice(note="not placed near a GPU"))
    yield made
    made.close()


def observe(tmp_path: Path, engine: str) -> Observer:
    return Observer(RankReport(rank=0), tmp_path / "report.json", tmp_path / "metrics.jsonl", engine)


@contextmanager
def watched(tmp_path: Path, loop: Loop, offloader: StateOffloader) -> Iterator[Observer]:
    """Observe a loop whose optimizer has its state on disk."""
    observer = observe(tmp_path, "disk")
    with Substitutions() as stack:
        LoopListener(observer, stack)
        fill(offloader)
        observer.built(SimpleNamespace(offloader=offloader))
        loop.build()
        yield observer


def records(tmp_path: Path) -> list[StepRecord]:
    return [StepRecord.from_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_a_step_that_megatron_skips_needs_no_state(
    tmp_path: Path, loop: Loop, offloader: StateOffloader
) -> None:
    with watched(tmp_path, loop, offloader) as observer:
        for number, skipped in ((1, 0), (2, 1), (3, 0), (4, 0)):
            if number in (1, 3):
                sweep(offloader, number)
                offloader.synchronize()
            loop.step(number, skipped=skipped)
        observer.close()
    assert (observer.report.steps, observer.report.steps_from_backend) == (4, 3)
    assert [step.engine for step in records(tmp_path)] == ["disk", "disk", "disk", "none"]


def test_training_goes_on_where_neither_metrics_nor_reports_can_be_written(
    tmp_path: Path, loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    observer = observe(tmp_path, "none")
    with Substitutions() as stack:
        LoopListener(observer, stack)
        loop.build()
        (tmp_path / "report.tmp").mkdir()
        loop.step(1)
        loop.step(2)
    observer.write()
    observer.close()
    assert capsys.readouterr().out.count("no more metrics are written: No space left on device") == 1
    assert observer.report.steps == 2
    assert RankReport.read(tmp_path / "report.json").steps == 0


def test_each_step_that_swept_counts_as_taken_from_the_backend(
    tmp_path: Path, loop: Loop, offloader: StateOffloader, capsys: pytest.CaptureFixture[str]
) -> None:
    with watched(tmp_path, loop, offloader) as observer:
        for number in (1, 2, 3):
            if number != 2:
                sweep(offloader, number)
                offloader.synchronize()
            loop.step(number)
        offloader.stores[Tier.DISK].slowest_s = 6.25
        observer.finish(digest=False)
        observer.close()
    steps = records(tmp_path)
    assert [(step.step, step.loss, step.grad_norm, step.learning_rate) for step in steps] == [
        (number, 2.5, 1.5, 0.1) for number in (1, 2, 3)
    ]
    # The second step swept nothing: its state came from elsewhere.
    assert [step.engine for step in steps] == ["disk", "none", "disk"]
    assert [step.chunks > 0 for step in steps] == [True, False, True]
    disk = offloader.stored_bytes(Tier.DISK)
    assert [step.bytes_written for step in steps] == [disk, 0, disk]
    assert loop.logged == [1, 2, 3]
    report = RankReport.read(tmp_path / "report.json")
    assert (report.steps, report.steps_from_backend, report.finished) == (3, 2, True)
    assert report.gpu_bytes == 0
    stalled = f"{tmp_path / 'state'} took 6.2 s for one request: the drive stalled, and a step waited"
    assert report.notes[-2:] == ["not placed near a GPU", stalled]
    assert (report.disk_bytes, report.host_bytes) == (disk, offloader.stored_bytes(Tier.HOST))
    assert (report.engine, report.direct_io) == ("disk", offloader.stores[Tier.DISK].direct)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("muon state step: ")
    assert "on disk" in line
    assert "in host memory" in line


def test_without_an_offloader_every_step_is_resident(tmp_path: Path, loop: Loop) -> None:
    observer = observe(tmp_path, "disk")
    with Substitutions() as stack:
        LoopListener(observer, stack)
        loop.build()
        loop.step(1, loss=None)
        observer.finish(digest=False)
    observer.close()
    (step,) = records(tmp_path)
    assert (step.engine, step.chunks, step.disk_bytes, step.loss) == ("none", 0, 0, None)
    report = RankReport.read(tmp_path / "report.json")
    assert (report.engine, report.gpu_bytes) == ("none", state_bytes(PARAMETERS))


def test_what_no_offloader_took_over_is_told_as_resident(
    tmp_path: Path, loop: Loop, offloader: StateOffloader
) -> None:
    observer = observe(tmp_path, "disk")
    with Substitutions() as stack:
        LoopListener(observer, stack)
        observer.built(SimpleNamespace(offloader=offloader))
        loop.parameters.append(torch.empty(1000))
        loop.build()
    observer.close()
    report = RankReport.read(tmp_path / "report.json")
    assert report.muon_state_bytes == state_bytes(PARAMETERS) + 8000
    assert report.gpu_bytes == 8000


def test_megatron_gets_its_functions_back(tmp_path: Path, loop: Loop) -> None:
    before = (loop.module.training_log, loop.module.setup_model_and_optimizer)
    observer = observe(tmp_path, "none")
    with Substitutions() as stack:
        LoopListener(observer, stack)
        assert loop.module.training_log is not before[0]
    observer.close()
    assert (loop.module.training_log, loop.module.setup_model_and_optimizer) == before


def test_a_write_that_failed_behind_the_last_step_keeps_the_report_unfinished(
    tmp_path: Path, loop: Loop
) -> None:
    from muon_offload_cli.storage.store import StoreError

    class Failed:
        """An offloader whose last write-back failed."""

        def synchronize(self) -> None:
            raise StoreError("EIO", path="/nvme", operation="write", errno=5)

    observer = observe(tmp_path, "disk")
    observer.write()
    observer.built(SimpleNamespace(offloader=Failed()))
    with pytest.raises(StoreError):
        observer.finish(digest=False)
    observer.close()
    assert not RankReport.read(tmp_path / "report.json").finished
