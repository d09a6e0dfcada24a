"""Saves on request, cut short, and without room: the checkpoint before stays."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muon_offload_cli.checkpoints.listing import list_checkpoints
from muon_offload_cli.checkpoints.names import SAVING
from tests.end_to_end import runs
from tests.end_to_end.saving import ONE, Saved, Started, complete, copy_of, engine_words, losses, saving
from tests.fakes.drive import small_filesystem
from tests.fakes.fake_torchrun import HANG_S


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


def has_pending(pid: int, signum: int) -> bool:
    """Whether a signal waits for a process that is stopped."""
    found = re.search(r"ShdPnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) & 1 << (signum - 1))


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
