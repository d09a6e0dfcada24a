"""Saving, resuming and resharding real runs."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from muon_offload_cli.checkpoints.listing import content_fault, has_optimizer, list_checkpoints
from muon_offload_cli.checkpoints.names import SAVING, step_folder
from muon_offload_cli.checkpoints.seal import Seal
from muon_offload_cli.records import RankReport
from tests.end_to_end import runs
from tests.end_to_end.conftest import Saved
from tests.end_to_end.planned import assert_as_planned
from tests.end_to_end.runs import DP2, TP2_EP2, Run
from tests.fakes.drive import directory_on_a_drive, small_filesystem
from tests.fakes.fake_torchrun import HANG_S

ONE = ("launcher=one_rank", "parallel=data")
ROUNDING = 2e-3
"""Relative difference of losses between layouts: sums in bf16 have another order."""
SOME_IN_HOST_MEMORY = "offload.host_memory_gb=0.0002"


def engine_words(engine: str, directory: Path) -> tuple[str, ...]:
    if engine in ("disk", "mapped"):
        return f"offload={engine}", f"offload.directory={directory}"
    return (f"offload={engine}",)


def saving(directory: Path, interval: int = 0) -> tuple[str, ...]:
    return f"checkpoint.directory={directory}", *([f"checkpoint.interval={interval}"] if interval else [])


def losses(run: Run) -> dict[int, float]:
    return {record.step: record.loss for record in run.records(0) if record.loss is not None}


def complete(directory: Path) -> list[int]:
    return [each.step for each in list_checkpoints(directory) if each.complete]


@pytest.fixture(scope="module")
def streamed(straight: Saved, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The same from step 2 on, with its state on disk, saving after every step."""
    root = tmp_path_factory.mktemp("streamed")
    state = directory_on_a_drive(root) / "state"
    run = runs.train(
        root / "run",
        *TP2_EP2,
        *engine_words("disk", state),
        f"resume={straight.checkpoints}/iter_0000002",
        *saving(root / "saved", interval=1),
    )
    assert run.exit_code == 0, run.output
    return Saved(run=run, checkpoints=root / "saved")


def same_end(straight: Run, resumed: Run) -> None:
    ends = {rank: report.digests for rank, report in straight.reports.items()}
    assert {rank: report.digests for rank, report in resumed.reports.items()} == ends
    later = resumed.curve(0)
    assert later == [entry for entry in straight.curve(0) if entry[0] >= later[0][0]]


def test_a_streamed_run_goes_on_from_a_resident_one_bit_for_bit(straight: Saved, streamed: Saved) -> None:
    same_end(straight.run, streamed.run)
    assert streamed.run.reports[0].loaded_step == 2
    assert complete(streamed.checkpoints) == [3, 4, 5, 6]
    sealed = list_checkpoints(streamed.checkpoints)[0].seal
    assert sealed is not None
    assert (sealed.engine, sealed.layout["tp"], sealed.layout["ep"], sealed.world_size) == ("disk", 2, 2, 4)
    assert content_fault(step_folder(streamed.checkpoints, 3), sealed) == ""


def test_adaptive_muon_goes_on_streamed_from_a_resident_run_bit_for_bit(
    tmp_path: Path, directory: Path
) -> None:
    # Stepped in a form that the installed packages lack; see tests/fakes/adaptive_muon.py.
    words, adaptive = (*DP2, "train.steps=4"), {"kind": "adaptive"}
    saved = saving(tmp_path / "saved", interval=2)
    straight = runs.train(tmp_path / "straight", *words, "offload=none", *saved, fault=adaptive)
    assert straight.exit_code == 0, straight.output
    resumed = runs.train(
        tmp_path / "resumed",
        *words,
        *engine_words("disk", directory),
        f"resume={tmp_path / 'saved' / 'iter_0000002'}",
        fault=adaptive,
    )
    assert resumed.exit_code == 0, resumed.output
    same_end(straight, resumed)
    report = resumed.reports[0]
    assert set(report.digests) == {"weights", "masters", "momenta", "second_moments"}
    assert report.disk_bytes >= report.muon_state_bytes == 12 * report.muon_parameters > 0


@pytest.mark.parametrize(
    ("engine", "more"),
    [("none", ()), ("host", ("offload.chunk_mb=0",)), ("mapped", ("offload.chunk_mb=0.2",))],
)
def test_every_engine_goes_on_from_streamed_state_bit_for_bit(
    straight: Saved, streamed: Saved, tmp_path: Path, directory: Path, engine: str, more: tuple[str, ...]
) -> None:
    resumed = runs.train(
        tmp_path / "run",
        *TP2_EP2,
        *engine_words(engine, directory),
        *more,
        f"resume={streamed.checkpoints}/iter_0000004",
    )
    assert resumed.exit_code == 0, resumed.output
    same_end(straight.run, resumed)


def test_other_layouts_go_on_and_back_within_rounding(
    straight: Saved, streamed: Saved, tmp_path: Path, directory: Path
) -> None:
    def go_on(name: str, source: Path, steps: int, *words: str) -> Run:
        run = runs.train(
            tmp_path / name,
            *words,
            f"train.steps={steps}",
            f"resume={source}",
            *saving(tmp_path / f"saved_{name}"),
        )
        assert run.exit_code == 0, run.output
        return run

    on_disk = engine_words("disk", directory)
    source = streamed.checkpoints / "iter_0000003"
    two = go_on("two", source, 4, *DP2, *on_disk, "offload.chunk_mb=0.1")
    resident = go_on("resident", source, 4, *DP2, "offload=none")
    staged = go_on("staged", source, 4, *DP2, "parallel.pp=2", *on_disk, SOME_IN_HOST_MEMORY)
    ep4 = ("launcher=four_ranks", "parallel=data", "parallel.ep=4", "offload=host")
    four = go_on("four", tmp_path / "saved_two", 5, *ep4)
    assert_as_planned(four, *ep4)
    back = go_on("back", tmp_path / "saved_four", 6, *TP2_EP2, *on_disk, SOME_IN_HOST_MEMORY)
    for run in (staged, back):
        assert all(report.disk_bytes and report.host_bytes for report in run.reports.values())
    # What resharding rounds is the same without offload, to the last bit.
    same_end(resident, two)
    expected = losses(straight.run)
    seen = losses(two) | losses(four) | losses(back)
    assert sorted(seen) == [4, 5, 6]
    # The last stage is the one that computes losses.
    for step, loss in [*seen.items(), (4, staged.records(1)[0].loss)]:
        assert loss == pytest.approx(expected[step], rel=ROUNDING)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One rank, six steps, saved at 2, 4 and 6, kept 2."""
    root = tmp_path_factory.mktemp("single")
    state = directory_on_a_drive(root) / "state"
    run = runs.train(
        root / "run",
        *ONE,
        *engine_words("disk", state),
        *saving(root / "saved", interval=2),
        "checkpoint.keep=2",
    )
    assert run.exit_code == 0, run.output
    assert complete(root / "saved") == [4, 6]
    return Saved(run=run, checkpoints=root / "saved")


def copy_of(single: Saved, tmp_path: Path) -> Path:
    target = tmp_path / "saved"
    subprocess.run(["cp", "-r", str(single.checkpoints), str(target)], check=True)
    return target


def test_a_flipped_bit_is_named_and_never_trained_on(single: Saved, tmp_path: Path, directory: Path) -> None:
    saved = copy_of(single, tmp_path)
    file = saved / "iter_0000006" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words("disk", directory),
        *saving(saved),
        "resume=auto",
        "train.steps=9",
    )
    assert run.exit_code == 2
    assert f"error: the checkpoint file {file} is damaged between bytes " in run.output
    assert run.reports[0].steps == 0


def test_a_truncated_file_is_passed_over_by_name(single: Saved, tmp_path: Path, directory: Path) -> None:
    saved = copy_of(single, tmp_path)
    with (saved / "iter_0000006" / "__0_0.distcp").open("r+b") as stream:
        stream.truncate(100_000)
    words = *ONE, *engine_words("disk", directory), *saving(saved), "train.steps=5"
    run = runs.train(tmp_path / "run", *words, "resume=auto")
    assert run.exit_code == 0, run.output
    assert "passes over step 6" in run.output
    assert "__0_0.distcp is truncated: 100000 of " in run.output
    assert run.reports[0].loaded_step == 4
    assert losses(run)[5] == losses(single.run)[5]


def test_another_model_is_refused_by_the_names_of_its_tensors(
    single: Saved, tmp_path: Path, directory: Path
) -> None:
    saved = copy_of(single, tmp_path)
    folder = saved / "iter_0000006"
    seal = Seal.read(folder)
    assert seal is not None
    # As if sealed before seals told the model: then only its tensors do.
    replace(seal, model={}).write(folder)
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words("disk", directory),
        f"resume={saved}",
        "model.moe.ffn_hidden_size=96",
        "train.steps=9",
    )
    assert run.exit_code == 2
    assert re.search(r"error: .* is not of this model: .*mlp\.experts.* has shape \[.*\], not \[", run.output)
    assert "Traceback" not in run.output


def test_another_learning_rate_and_schedule_load(single: Saved, tmp_path: Path, directory: Path) -> None:
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words("disk", directory),
        f"resume={single.checkpoints}",
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0.2",
        "optimizer.lr_decay_style=linear",
        "train.steps=10",
    )
    assert run.exit_code == 0, run.output
    rates = [record.learning_rate for record in run.records(0)]
    assert rates == pytest.approx([3e-5, 2e-5, 1e-5, 0.0], abs=1e-6)


@pytest.mark.parametrize("engine", ["disk", pytest.param("none", marks=pytest.mark.nightly)])
def test_weights_alone_begin_a_new_run_and_masters_follow_them(
    single: Saved, tmp_path: Path, directory: Path, engine: str
) -> None:
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words(engine, directory),
        f"resume={single.checkpoints}",
        "resume.weights_only=true",
        # As good as none: half of a bf16 weight's last place is larger by far.
        "optimizer.lr=1e-30",
        "optimizer.weight_decay=0",
        "train.steps=2",
        *saving(tmp_path / "weights"),
        "checkpoint.optimizer=false",
    )
    assert run.exit_code == 0, run.output
    assert [record.step for record in run.records(0)] == [1, 2]
    (kept,) = list_checkpoints(tmp_path / "weights")
    assert (kept.complete, has_optimizer(kept)) == (True, False)
    # Of 14 bytes a parameter, two.
    assert kept.size < seal_bytes(single.checkpoints) / 4
    assert run.reports[0].digests["weights"] == single.run.reports[0].digests["weights"]


@dataclass
class Started:
    """A launcher that runs, and the first of its ranks."""

    process: subprocess.Popen[str]
    folder: Path

    def report(self) -> RankReport | None:
        try:
            return RankReport.read(self.folder / "reports" / "rank_0.json")
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def wait_for(self, condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def steps(self) -> int:
        path = self.folder / "metrics" / "rank_0.jsonl"
        return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    begun: list[Started] = []

    def run(*words: str) -> Started:
        folder = tmp_path / f"run_{len(begun)}"
        process = subprocess.Popen(
            runs.command(folder, *words),
            env=runs.environment(),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        begun.append(Started(process=process, folder=folder))
        return begun[-1]

    yield run
    for each in begun:
        each.process.kill()
        each.process.communicate()


def test_sigterm_saves_after_the_step_and_exits_5(
    start: Callable[..., Started], tmp_path: Path, directory: Path
) -> None:
    saved = tmp_path / "saved"
    words = *ONE, *engine_words("disk", directory), *saving(saved), "resume=auto"
    run = start(*words, "train.steps=5000")
    run.wait_for(lambda: run.steps() >= 2)
    run.process.send_signal(signal.SIGTERM)
    output, _ = run.process.communicate(timeout=HANG_S)
    assert run.process.returncode == 5, output
    (step,) = complete(saved)
    assert f"saved and ended after step {step} of 5000, as asked; resume=auto goes on" in output
    resumed = runs.train(tmp_path / "resumed", *words, f"train.steps={step + 1}")
    assert resumed.exit_code == 0, resumed.output
    assert list(losses(resumed)) == [step + 1]


def test_a_second_sigterm_ends_at_once(
    start: Callable[..., Started], tmp_path: Path, directory: Path
) -> None:
    run = start(*ONE, *engine_words("disk", directory), *saving(tmp_path / "saved"), "train.steps=5000")
    run.wait_for(lambda: run.steps() >= 1)
    report = run.report()
    assert report is not None
    # A rank that is stopped reaches no step boundary.
    psutil.Process(report.pid).suspend()
    run.process.send_signal(signal.SIGTERM)
    # Two at once would be one; the launcher has noted the first when it has handed it on.
    run.wait_for(lambda: has_pending(report.pid, signal.SIGTERM))
    run.process.send_signal(signal.SIGTERM)
    run.process.communicate(timeout=HANG_S)
    assert run.process.returncode == 128 + signal.SIGTERM
    assert complete(tmp_path / "saved") == []


def has_pending(pid: int, signum: int) -> bool:
    """Whether a signal waits for a process that is stopped."""
    found = re.search(r"ShdPnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) & 1 << (signum - 1))


def test_sigkill_during_a_save_leaves_the_one_before(
    start: Callable[..., Started], tmp_path: Path, directory: Path
) -> None:
    saved = tmp_path / "saved"
    words = *ONE, *engine_words("disk", directory), *saving(saved, interval=1)
    run = start(*words, "train.steps=5000")
    run.wait_for(lambda: len(complete(saved)) >= 2)
    run.wait_for(lambda: any((saved / SAVING).glob("iter_*/*.distcp")))
    report = run.report()
    assert report is not None
    psutil.Process(report.pid).kill()
    run.process.communicate(timeout=HANG_S)
    last = max(complete(saved))
    # There is none where the kill came late, and one without a seal where it came just before that.
    assert all("its save" in each.fault for each in list_checkpoints(saved) if each.step > last)
    resumed = runs.train(tmp_path / "resumed", *words, "resume=auto", f"train.steps={last + 1}")
    assert resumed.exit_code == 0, resumed.output
    assert resumed.reports[0].loaded_step == last
    assert not (saved / SAVING).exists()


def test_a_save_that_cannot_be_written_is_told_and_leaves_the_one_before(
    single: Saved, tmp_path: Path
) -> None:
    saved = copy_of(single, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files of this process and its children may not grow beyond this: what a full drive does, without one.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        run = runs.train(
            tmp_path / "run", *ONE, "offload=host", *saving(saved), "resume=auto", "train.steps=7"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.exit_code == 3, run.output
    assert f"checkpoint.directory={saved} cannot be written: EFBIG (File too large): " in run.output
    assert complete(saved) == [4, 6]
    again = runs.train(
        tmp_path / "again", *ONE, "offload=host", *saving(saved), "resume=auto", "train.steps=7"
    )
    assert again.exit_code == 0, again.output
    assert complete(saved) == [4, 6, 7]


def seal_bytes(saved: Path) -> int:
    """Size of the newest checkpoint."""
    sealed = list_checkpoints(saved)[-1].seal
    assert sealed is not None
    return sealed.nbytes


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Let a process stand still, so that what is seen of it is of one moment."""
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        yield
    finally:
        process.resume()


def test_ten_saves_leave_disk_memory_descriptors_and_maps_as_one_does(
    start: Callable[..., Started], tmp_path: Path, directory: Path
) -> None:
    saved = tmp_path / "saved"
    run = start(
        *ONE,
        *engine_words("disk", directory),
        *saving(saved, interval=2),
        "checkpoint.keep=2",
        "train.steps=5000",
    )
    samples: dict[int, tuple[int, int, int, int, int]] = {}

    def sampled() -> bool:
        report = run.report()
        # The first steps of any process grow its heap, saves or not; from then on it is level.
        if report is None or report.saves < 12 or report.saves in samples:
            return False
        process = psutil.Process(report.pid)
        with stopped(process):
            # Between two saves, where nothing of a save may be left.
            if (saved / SAVING).exists():
                return False
            maps = len(Path(f"/proc/{report.pid}/maps").read_text().splitlines())
            anonymous = int(
                re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{report.pid}/status").read_text())[1]  # type: ignore[index]
            )
            # Files without a name are the state's.
            state = sum(
                file.stat().st_blocks
                for file in Path(f"/proc/{report.pid}/fd").iterdir()
                if "(deleted)" in str(file.readlink())
            )
            figures = process.num_fds(), process.num_threads(), maps, anonymous, state
            samples[report.saves] = figures
        return len(samples) >= 10

    run.wait_for(sampled)
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=HANG_S)
    # The least of several, since a process may have just opened a file or started a thread.
    ordered = [samples[saves] for saves in sorted(samples)]
    first, last = (list(map(min, *part)) for part in (ordered[:5], ordered[5:]))
    assert last[0] <= first[0]
    assert last[1] <= first[1]
    assert last[2] <= first[2] + 8
    assert last[4] == first[4] > 0
    # Ten copies of the state alone would be more.
    assert last[3] <= first[3] + 8 * 1024
    # Those that are kept, and one more that is being saved or deleted.
    assert sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) < 4 * seal_bytes(saved)


BIG = (
    *ONE,
    "model=tiny_dense",
    "model.num_layers=3",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=4096",
    "model.vocab_size=16384",
    "train.sequence_length=16",
    "train.global_batch=1",
    "train.micro_batch=1",
    "offload.chunk_mb=32",
    "offload.staging_mb=64",
    "run.digest=false",
)
STATE_BYTES = 300 * 2**20
"""What the masters and momenta of `BIG` take at least; Adam's state of its embeddings takes 384 MiB."""


def test_no_copy_of_the_state_is_made_in_memory(tmp_path: Path, directory: Path) -> None:
    saved = tmp_path / "saved"
    words = *BIG, *engine_words("disk", directory), *saving(saved)
    for kind, more in (("saving", ("train.steps=1",)), ("loading", ("train.steps=2", "resume=auto"))):
        run = runs.train(tmp_path / kind, *words, *more, moe=False)
        assert run.exit_code == 0, run.output
        report = run.reports[0]
        assert report.muon_state_bytes >= STATE_BYTES
        assert report.adam_state_bytes >= STATE_BYTES
        # Buffers of 136 MiB (168 while loading) and a tensor or two. A copy of the state would be more, and
        # one of what SwiGLU's factory makes too; mapped pages of the file count as well.
        assert 0 < report.save_memory_bytes < STATE_BYTES
        # Adam's two moments are made while loading: on a CPU device they are host memory too.
        assert report.load_memory_bytes < STATE_BYTES + report.adam_state_bytes * 2 / 3
    assert report.loaded_step == 1
    assert report.load_memory_bytes > 0


def test_a_drive_that_fills_up_keeps_the_state_and_the_checkpoint_before(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    with small_filesystem(tmp_path, mib=96) as drive:
        saved = drive / "saved"
        words = *ONE, *engine_words("disk", drive / "state"), *saving(saved), "resume=auto"
        first = runs.train(tmp_path / "first", *words, "train.steps=2")
        assert first.exit_code == 0, first.output
        run = start(*words, "train.steps=5000")
        run.wait_for(lambda: run.steps() >= 1)
        ballast = drive / "ballast"
        with ballast.open("wb", buffering=0) as file:
            # ext4 holds some blocks back until it knows how many the file's own map takes.
            for _ in range(3):
                with pytest.raises(OSError, match="No space left"):
                    while True:
                        file.write(bytes(4096))
                os.fsync(file)
        # Its blocks are reserved: the state goes on moving on a drive that is full.
        taken = run.steps()
        run.wait_for(lambda: run.steps() >= taken + 2)
        run.process.send_signal(signal.SIGTERM)
        output, _ = run.process.communicate(timeout=HANG_S)
        assert run.process.returncode == 3, output
        assert f"checkpoint.directory={saved} cannot be written: ENOSPC (No space left on device): " in output
        assert complete(saved) == [2]
        ballast.unlink()
        again = runs.train(tmp_path / "again", *words, "train.steps=3")
        assert again.exit_code == 0, again.output
        assert (again.reports[0].loaded_step, complete(saved)) == (2, [2, 3])
