"""One run at a time saves in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fake_torchrun import wait_until

from muon_offload_cli.checkpoints.names import LOCK, SAVING
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import UserError
from muon_offload_cli.launch.claim import sole_saver
from muon_offload_cli.launch.resume import settle_checkpoints


def saving(folder: Path | None, node_rank: int = 0) -> Config:
    made = Config(recipe="tiny")
    made.checkpoint.directory = None if folder is None else str(folder)
    made.launcher.node_rank = node_rank
    return made


def test_a_second_run_is_refused_with_the_first_ones_name_until_it_has_ended(tmp_path: Path) -> None:
    with sole_saver(saving(tmp_path)):
        with pytest.raises(UserError) as refused, sole_saver(saving(tmp_path)):
            pass
        assert (
            f"checkpoint.directory={tmp_path}: another run saves there now (process {os.getpid()} on "
            in str(refused.value)
        )
        assert refused.value.exit_code == 2
    with sole_saver(saving(tmp_path)) as claim:
        assert claim.remarks == ()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_offered_instead_can_be_pasted_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    with (
        sole_saver(saving(folder)),
        pytest.raises(UserError) as refused,
        sole_saver(saving(folder)),
    ):
        pass
    (problem,) = refused.value.problems
    assert problem.fix == f"wait until it has ended, or 'checkpoint.directory=\"{folder}-2\"'"


HOLD = """
import os, subprocess, sys
from muon_offload_cli.checkpoints.names import LOCK
from muon_offload_cli.config.schema import Config
from muon_offload_cli.launch.claim import sole_saver
config = Config(recipe="tiny")
config.checkpoint.directory = sys.argv[1]
with sole_saver(config) as claim:
    child = subprocess.Popen(["sleep", "600"], pass_fds=claim.descriptors, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    child.wait()
"""


def test_a_killed_launcher_holds_the_folder_for_as_long_as_processes_of_its_job_live(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    job = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.communicate()
    with pytest.raises(UserError, match=f"another run saves there now .process {launcher.pid} on "):
        sole_saver(saving(tmp_path)).__enter__()
    job.kill()
    assert wait_until(lambda: not job.is_running() or job.status() == psutil.STATUS_ZOMBIE)
    assert (tmp_path / LOCK).exists()
    with sole_saver(saving(tmp_path)):
        pass
    assert not (tmp_path / LOCK).exists()


def test_only_node_0_and_only_a_run_that_saves_holds_the_folder(tmp_path: Path) -> None:
    with (
        sole_saver(saving(tmp_path)),
        sole_saver(saving(tmp_path, node_rank=1)) as other,
        sole_saver(saving(None)) as none,
    ):
        assert other.descriptors == none.descriptors == ()


def test_a_folder_that_the_run_made_is_removed_if_nothing_was_saved_there(tmp_path: Path) -> None:
    for saved in ([], ["iter_0000001"]):
        with sole_saver(saving(tmp_path / "ck")):
            for name in saved:
                (tmp_path / "ck" / name).mkdir()
        assert (tmp_path / "ck").exists() is bool(saved)


def test_a_filesystem_without_locks_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with sole_saver(saving(tmp_path)) as claim:
        (remark,) = claim.remarks
        assert "nothing keeps a second run from saving there too" in remark.what


def test_the_lock_that_a_crash_leaves_behind_is_for_every_user_to_open(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with sole_saver(saving(tmp_path)):
            assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o666
    finally:
        os.umask(before)


def test_another_users_lock_that_cannot_be_opened_is_told_with_what_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, *more: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    folder = tmp_path / "a b"
    for left in (False, True):
        with monkeypatch.context() as patched, pytest.raises(UserError) as refused:
            patched.setattr(os, "open", refuse)
            with sole_saver(saving(folder)):
                pass
        (problem,) = refused.value.problems
        assert (problem.fix == f"rm '{folder}/{LOCK}'") is left
        (folder / LOCK).touch()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/nowhere/at/all")])
@pytest.mark.parametrize("source", [None, "auto", "none", "2"])
def test_what_is_no_lock_file_is_told_with_what_removes_it_and_so_by_a_look(
    tmp_path: Path, make: Callable[[Path], None], source: str | None
) -> None:
    make(tmp_path / LOCK)
    config = saving(tmp_path)
    with pytest.raises(UserError) as refused, sole_saver(config):
        pass
    assert refused.value.problems[0].fix == f"rm -r {tmp_path / LOCK}"
    (tmp_path / SAVING).touch()
    config.resume.source = source
    with pytest.raises(UserError) as looked:
        settle_checkpoints(config, tmp_path)
    lock, growing = looked.value.problems
    assert (lock, growing.fix) == (refused.value.problems[0], f"rm -r {tmp_path / SAVING}")
    for problem in (lock, growing):
        subprocess.run(problem.fix.split(), check=True)
    with sole_saver(saving(tmp_path)):
        pass


def test_a_link_to_a_folder_is_no_place_for_saves_to_grow_in(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / SAVING).symlink_to("elsewhere")
    with pytest.raises(UserError) as refused:
        settle_checkpoints(saving(tmp_path), tmp_path)
    assert refused.value.problems[0].fix == f"rm -r {tmp_path / SAVING}"
    subprocess.run(refused.value.problems[0].fix.split(), check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_folder_that_cannot_be_made_is_told_as_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"^checkpoint.directory=\S+/file/ck cannot be written: Not a dir"),
        sole_saver(saving(tmp_path / "file" / "ck")),
    ):
        pass
