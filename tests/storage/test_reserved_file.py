from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from muon_offload_cli.errors import UserError
from muon_offload_cli.machine.anonymous_file import open_anonymous
from muon_offload_cli.machine.filesystem import inspect
from muon_offload_cli.storage.buffer import HostBuffer
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.mapped import MappedStore
from muon_offload_cli.storage.reserved_file import create_reserved
from muon_offload_cli.storage.store import StoreError
from muon_offload_cli.storage.system_calls import SYSTEM
from muon_offload_cli.units import GIB, MIB
from tests.fakes.drive import directory_on_a_drive, small_filesystem
from tests.fakes.fake_torchrun import HANG_S
from tests.fakes.stores import failing_calls, interrupted_calls


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return directory_on_a_drive(tmp_path) / "state"


def test_the_file_is_the_owners_alone_and_its_blocks_are_taken(directory: Path) -> None:
    file = create_reserved(directory, 5 * MIB + 1, direct=True)
    facts = os.fstat(file.fd)
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert facts.st_nlink == 0
    assert facts.st_size == file.size == 5 * MIB + 4096
    assert facts.st_blocks * 512 >= file.size
    assert not os.get_inheritable(file.fd)
    assert list(directory.iterdir()) == []
    file.close()
    file.close()
    assert not directory.exists()


def test_a_filesystem_without_o_tmpfile_gets_a_name_for_a_moment(directory: Path) -> None:
    directory.mkdir()
    fd = open_anonymous(directory, tmpfile=False)
    try:
        assert list(directory.iterdir()) == []
        assert os.fstat(fd).st_nlink == 0
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    finally:
        os.close(fd)


def test_the_probe_for_direct_io_leaves_zeros(directory: Path) -> None:
    with DirectStore(directory, MIB) as store:
        assert bytes(store.view(Extent(0, MIB))) == bytes(MIB)


def test_a_directory_of_the_users_own_stays_as_it_was(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    create_reserved(directory, MIB, direct=True).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755


def test_a_directory_that_has_to_be_made_on_the_root_filesystem_is_told(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_root = inspect(directory.parent).mount_point == "/"
    create_reserved(directory, MIB, direct=True).close()
    assert [str(directory) in text for text in caplog.messages] == [True] * on_root
    caplog.clear()
    directory.mkdir()
    create_reserved(directory, MIB, direct=True).close()
    assert caplog.messages == []


def test_a_directory_that_holds_other_files_is_not_removed(directory: Path) -> None:
    file = create_reserved(directory, MIB, direct=True)
    (directory / "mine").write_text("keep")
    file.close()
    assert (directory / "mine").read_text() == "keep"


def test_ranks_that_come_and_go_do_not_disturb_each_other(directory: Path) -> None:
    def come_and_go(_: int) -> int:
        file = create_reserved(directory, 8192, direct=False)
        file.close()
        return os.getpid()

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(come_and_go, range(300)))) == 300
    assert not directory.exists()


@pytest.mark.parametrize(
    ("code", "what", "fix"),
    [
        (errno.ENOSPC, r"rank 3 needs 4\.00 TiB on .*\(.+\), which has .* free\.", "free "),
        (errno.EDQUOT, r"rank 3 needs 4\.00 TiB.*quota", "quota"),
        (errno.EFBIG, r"rank 3 needs 4\.00 TiB.*not allowed", "ulimit -f"),
    ],
)
def test_no_room_is_told_with_figures_and_leaves_nothing(
    directory: Path, code: int, what: str, fix: str
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        create_reserved(
            directory, 4096 * GIB, True, owner="rank 3", calls=failing_calls("posix_fallocate", code)
        )
    assert caught.value.exit_code == 3
    assert fix in caught.value.problems[0].fix
    assert caught.value.problems[0].keys == ("offload.directory",)
    assert not directory.exists()


def test_a_bad_drive_is_a_store_error_and_leaves_nothing(directory: Path) -> None:
    with pytest.raises(StoreError, match=r"open.*EIO"):
        create_reserved(directory, MIB, True, calls=failing_calls("posix_fallocate", errno.EIO))
    assert not directory.exists()

    def bad_page(fd: int) -> bool:
        raise OSError(errno.EIO, "bad page")

    with pytest.raises(StoreError, match="EIO"):
        create_reserved(directory, MIB, True, calls=replace(SYSTEM, enable_direct_io=bad_page))
    assert not directory.exists()


def test_an_interrupted_reservation_is_continued(directory: Path) -> None:
    file = create_reserved(directory, MIB, False, calls=interrupted_calls())
    assert os.fstat(file.fd).st_blocks * 512 >= MIB
    file.close()


def test_unusable_directories_are_refused_with_a_fix(tmp_path: Path, directory: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    cases = {
        Path("relative/state"): "relative",
        tmp_path / "missing" / "state": "does not exist",
        a_file: "not a directory",
        a_file / "state": "file",
        loop: "loop",
    }
    for path, what in cases.items():
        with pytest.raises(UserError, match=what) as caught:
            create_reserved(path, MIB, True)
        assert caught.value.exit_code == 2, path
        assert caught.value.problems[0].fix, path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_memory_filesystems_are_refused_by_name() -> None:
    shared = Path("/dev/shm")
    if not shared.is_mount():
        pytest.skip("/dev/shm is no mount here")
    with pytest.raises(UserError, match=r"tmpfs.*host memory"):
        create_reserved(shared / "muon-offload-test", MIB, True)
    assert not (shared / "muon-offload-test").exists()


def test_a_directory_that_may_not_be_written_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o500)
    code = f"""
import os, pathlib
from muon_offload_cli.errors import UserError
from muon_offload_cli.storage.reserved_file import create_reserved
path = pathlib.Path({str(directory)!r})
if os.geteuid() == 0:
    path.parent.parent.parent.chmod(0o711); path.parent.parent.chmod(0o711); path.parent.chmod(0o711)
    os.setgid(65534); os.setuid(65534)
try:
    create_reserved(path, 4096, True)
except UserError as error:
    print(error.exit_code, error)
"""
    answer = _run(code)
    assert answer.startswith("2 "), answer
    assert "EACCES" in answer


def test_a_limit_on_file_sizes_is_named(directory: Path) -> None:
    code = f"""
import pathlib, resource
from muon_offload_cli.errors import UserError
from muon_offload_cli.storage.reserved_file import create_reserved
resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))
try:
    create_reserved(pathlib.Path({str(directory)!r}), {8 * MIB}, True)
except UserError as error:
    print(error.exit_code, error.problems[0].fix)
"""
    assert _run(code).startswith("3 raise the limit on file sizes (ulimit -f)")
    assert not directory.exists()


def test_a_killed_process_leaves_no_bytes(directory: Path) -> None:
    code = f"""
import pathlib, time
from muon_offload_cli.storage.direct import DirectStore
store = DirectStore(pathlib.Path({str(directory)!r}), {64 * MIB})
print("ready", flush=True)
time.sleep(60)
"""
    directory.mkdir()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=HANG_S)
    assert list(directory.iterdir()) == []


def test_a_full_disk_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with small_filesystem(directory_on_a_drive(tmp_path), mib=64) as small:
        free = os.statvfs(small).f_bavail
        for kind in (DirectStore, MappedStore):
            with pytest.raises(UserError, match=r"rank 0 needs 64\.00 MiB on .*\(ext4\)") as caught:
                kind(small / "state", 64 * MIB, owner="rank 0")
            assert caught.value.exit_code == 3
            assert "MiB" in caught.value.problems[0].fix
        assert not (small / "state").exists()
        assert os.statvfs(small).f_bavail == free


def test_what_was_reserved_can_be_written_on_a_disk_that_filled_up_since(tmp_path: Path) -> None:
    with (
        small_filesystem(directory_on_a_drive(tmp_path), mib=64) as small,
        DirectStore(small / "state", 32 * MIB) as store,
        HostBuffer(MIB) as buffer,
    ):
        with (small / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(MIB))
        for index in range(32):
            buffer.memory[:] = bytes([index]) * MIB
            store.write_from(Extent(index * MIB, MIB), buffer.memory)
        store.flush()
        assert bytes(store.view(Extent(31 * MIB, MIB))) == bytes([31]) * MIB


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
