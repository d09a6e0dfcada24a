"""Naming the rank that died first, on the texts that real runs leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muon_offload_cli.launch.cause import MachineFigures
from muon_offload_cli.launch.post_mortem import Evidence, PostMortem, explain
from muon_offload_cli.launch.torchrun_log import early_output, rank_exits
from muon_offload_cli.records import RankReport
from tests.fakes.fake_torchrun import HANG_S

LOGS = Path(__file__).parent / "logs"
GIB = 1 << 30


def evidence(torchrun_log: str, **more: object) -> Evidence:
    reports = more.pop("reports", {})
    known: dict[str, object] = {
        "ranks": range(4),
        "total_steps": 30,
        "torchrun_log": torchrun_log,
        "torchrun_log_path": Path("/run/logs/torchrun.log"),
        "rank_logs": {},
        "rank_log_paths": {rank: Path(f"/run/logs/rank_{rank}.log") for rank in range(4)},
        "reports": reports,
        "steps": dict.fromkeys(range(4), 12),
    }
    return Evidence(**known | more)  # type: ignore[arg-type]


def torchrun_log(*exits: tuple[int, int]) -> str:
    """The block that torchrun ends with; the first pair is its root cause."""
    text = (
        "E1129 16:48:30.742000 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed\nFailures:\n"
    )
    for number, (rank, code) in [*enumerate(exits[1:], 1), (0, exits[0])]:
        if number == 0:
            text += "-----\nRoot Cause (first observed failure):\n"
        text += f"[{number}]:\n  time : x\n  host : y\n  rank      : {rank} (local_rank: {rank})\n"
        text += f"  exitcode  : {code} (pid: {100 + rank})  (SIGX)\n  error_file: <N/A>\n"
    return text


def report(rank: int, error: str = "", **problem: object) -> RankReport:
    return RankReport(rank=rank, error=error, problems=[problem] if problem else [])


KILLED = torchrun_log((1, -9), (0, -15), (2, 1), (3, 1))
LOST = "DistBackendError: NCCL watchdog timeout: Some NCCL operations have failed or timed out"
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3321"


def test_the_real_log_of_a_killed_rank_names_it_first() -> None:
    exits = rank_exits((LOGS / "torchrun_killed.log").read_text())
    assert [(item.rank, item.exit_code, item.signal_name) for item in exits] == [
        (1, -9, "SIGKILL"),
        (0, -15, "SIGTERM"),
    ]


def test_the_real_log_of_an_exception_names_its_rank_first() -> None:
    exits = rank_exits((LOGS / "torchrun_raised.log").read_text())
    assert [(item.rank, item.exit_code) for item in exits] == [(1, 1), (0, -15)]


def test_a_log_cut_before_its_last_block_still_tells_the_local_rank() -> None:
    text = (LOGS / "torchrun_killed.log").read_text().partition("Traceback")[0]
    assert [(item.rank, item.exit_code) for item in rank_exits(text, first_rank=8)] == [(9, -9)]


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        (1, "the kernel's out-of-memory killer, which struck during this run"),
        (0, "somebody sent SIGKILL"),
        (None, "usually the kernel's out-of-memory killer"),
    ],
)
def test_sigkill_is_told_with_the_limit_and_the_peak(kills: int | None, words: str) -> None:
    machine = MachineFigures(oom_kills=kills, memory_limit_bytes=16 * GIB, memory_peak_bytes=16 * GIB - 1)
    found = explain(evidence(KILLED, machine=machine, reports={2: report(2, CLOSED), 3: report(3, LOST)}))
    assert found.what == "rank 1 died of signal 9 (SIGKILL), after step 12 of 30."
    assert found.cause.startswith(words)
    assert "limit 16.00 GiB, peak 16.00 GiB" in found.cause
    assert found.log == Path("/run/logs/rank_1.log")
    assert found.exit_code == 4


def test_sigbus_is_told_as_a_full_filesystem() -> None:
    machine = MachineFigures(disk_directory="/nvme", disk_free_bytes=0)
    found = explain(evidence(torchrun_log((2, -7), (0, -15)), machine=machine))
    assert found.what.startswith("rank 2 died of signal 7 (SIGBUS)")
    assert "0 B free in /nvme" in found.cause


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("EROFS (Read-only file system)", "became read-only"),
        ("EIO (Input/output error)", "the drive reports errors"),
        ("ENOSPC (No space left on device)", "a filesystem is full"),
    ],
)
def test_what_a_drive_said_is_told_with_what_to_do(cause: str, words: str) -> None:
    error = f"StoreError: write of 8.00 MiB at offset 0 in the store in /nvme failed: {cause}"
    found = explain(evidence(torchrun_log((2, 1), (0, -15)), reports={2: report(2, error)}))
    assert words in found.cause
    assert "offload.directory" in found.cause


@pytest.mark.parametrize("secondary", [LOST, CLOSED, "DistNetworkError: Broken pipe"])
def test_a_rank_that_lost_its_peer_is_never_named_first(secondary: str) -> None:
    # Torchrun saw rank 0 first: its error came through a socket faster than rank 3's own exit.
    found = explain(
        evidence(
            torchrun_log((0, 1), (3, 1), (1, -15)),
            reports={0: report(0, secondary), 3: report(3, "ValueError: loss is NaN")},
        )
    )
    assert found.rank == 3
    assert "failed with ValueError: loss is NaN" in found.what


def test_a_killed_rank_is_named_before_a_peer_that_torchrun_saw_first() -> None:
    found = explain(evidence(torchrun_log((0, 1), (3, -9)), reports={0: report(0, CLOSED)}))
    assert found.rank == 3


def test_a_peer_aborted_by_its_watchdog_is_not_the_cause() -> None:
    found = explain(
        evidence(torchrun_log((0, -6), (3, 1)), rank_logs={0: LOST}, reports={3: report(3, "KeyError: 'x'")})
    )
    assert found.rank == 3


def test_only_the_named_ranks_lines_are_shown() -> None:
    logs = {1: "\n".join(f"[rank1]: line {n}" for n in range(40)), 0: "noise", 2: CLOSED}
    found = explain(evidence(KILLED, rank_logs=logs))
    assert found.last_lines == [f"line {n}" for n in range(28, 40)]


def test_a_repeated_warning_is_shown_once() -> None:
    found = explain(evidence(KILLED, rank_logs={1: "cause\n" + "warning\n" * 40}))
    assert found.last_lines == ["cause", "warning"]


WARNINGS = """W1129 20:19:27.007000 20343 torch/utils/cpp_extension.py:183] No CUDA runtime is found
/site/megatron/core/models/backends.py:34: UserWarning: Apex is not installed. Falling back to Torch Norm
  warnings.warn("Apex is not installed. Falling back to Torch Norm")
[rank1]:/site/my package/c10d_logger.py:83: FutureWarning: `all_gather` is deprecated.
[rank1]:  return func(*args, **kwargs)
WARNING: Inferring the appropriate argparse argument type from <class 'x'> failed for y: typing.Union[int]
Deferring to attribute metadata. If the metadata is incomplete, 'parser.add_argument()' may fail.
Original failure: Unions not supported by argparse: typing.Union[int, typing.Literal['max'], NoneType]
WARNING:megatron.core.rerun_state_machine:Result validation enabled
"""


@pytest.mark.parametrize(("code", "ending"), [(-9, "died of signal 9 (SIGKILL)"), (7, "exited with code 7")])
def test_warnings_are_not_shown_as_the_last_words_of_a_rank(code: int, ending: str) -> None:
    def last_lines(text: str) -> list[str]:
        early = "OMP_NUM_THREADS is set\n" + torchrun_log((1, code), (0, -15))
        found = explain(evidence(early, rank_logs={1: text}))
        assert found.ending == ending
        assert found.log == Path("/run/logs/rank_1.log")
        return found.last_lines

    assert last_lines(WARNINGS) == []
    assert last_lines(f"mine\n{WARNINGS}  indented\n{WARNINGS.rstrip()}") == ["mine", "  indented"]


def test_a_user_error_of_all_ranks_is_told_once_with_its_own_code() -> None:
    reports = {
        rank: report(rank, "does not fit", what="needs 3 GiB", fix="chunk_mb=1", exit_code=3)
        for rank in range(4)
    }
    found = explain(evidence(torchrun_log((0, 3), (1, 3), (2, 3), (3, -15)), reports=reports))
    assert [(p.what, p.fix) for p in found.problems] == [("needs 3 GiB", "chunk_mb=1")]
    assert found.exit_code == 3


def test_a_user_error_beside_lost_peers_is_still_the_cause() -> None:
    reports = {0: report(0, CLOSED), 1: report(1, "full", what="full", exit_code=3)}
    found = explain(evidence(torchrun_log((0, 1), (1, 3)), reports=reports))
    assert (found.rank, found.exit_code) == (1, 3)


def test_a_user_error_beside_a_real_failure_is_a_failed_job() -> None:
    reports = {0: report(0, "ValueError: x"), 1: report(1, "full", what="full", exit_code=3)}
    assert explain(evidence(torchrun_log((0, 1), (1, 3)), reports=reports)).exit_code == 4


def test_a_rank_that_died_before_its_log_shows_what_it_printed() -> None:
    text = "Traceback\n  x\nModuleNotFoundError: No module named 'torch'\n" + torchrun_log((0, 1), (1, -15))
    found = explain(evidence(text, steps={}))
    assert found.what == (
        "rank 0 failed with ModuleNotFoundError: No module named 'torch', before its first step."
    )
    assert found.log == Path("/run/logs/torchrun.log")
    assert "elastic" not in early_output(text)


def test_torchrun_itself_failing_shows_its_log() -> None:
    found = explain(evidence("/py: No module named torch\n"))
    assert found.rank is None
    assert found.last_lines == ["/py: No module named torch"]
    assert found.exit_code == 4


def test_a_full_gpu_and_a_full_disk_are_recognized() -> None:
    def cause(error: str) -> str:
        return explain(evidence(torchrun_log((0, 1)), reports={0: report(0, error)})).cause

    assert "the GPU's memory is full" in cause("OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert "a filesystem is full" in cause("OSError: [Errno 28] No space left on device")
    assert cause("ValueError: x") == ""


def test_an_unending_job_names_the_rank_that_did_not_finish() -> None:
    reports = {rank: RankReport(rank=rank, finished=rank != 2) for rank in range(4)}
    found = explain(evidence("", reports=reports, gave_up=True))
    assert found.rank == 2


RANK = """
import os, signal, time
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    {act}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("act", "ending"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "died of signal 9 (SIGKILL)"),
        ("raise RuntimeError('boom')", "failed with RuntimeError: boom"),
    ],
)
def test_the_installed_torchrun_is_still_understood(tmp_path: Path, act: str, ending: str) -> None:
    (tmp_path / "rank.py").write_text(RANK.format(act=act))
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "rank.py")],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    found: PostMortem = explain(evidence(done.stdout + done.stderr, ranks=range(2), steps={}))
    assert (found.rank, found.ending) == (1, ending)
