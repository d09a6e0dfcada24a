"""A rank's boundary: its exit code, its report and its log, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muon_offload_cli.errors import does_not_fit, wrong
from muon_offload_cli.records import RankReport
from tests.fakes.fake_torchrun import HANG_S

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import sys
from muon_offload_cli.errors import UserError, does_not_fit, wrong
from muon_offload_cli.megatron import worker
from muon_offload_cli.storage.store import StoreError

def train(config_path, folder, report, report_path):
    print("before")
    {body}

worker._train = train
sys.exit(worker.main(sys.argv[1:]))
"""


def work(tmp_path: Path, body: str) -> tuple[int, RankReport, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body), str(tmp_path / "none.yaml"), str(tmp_path)],
        env=os.environ | {"RANK": "3", "PYTHONPATH": str(REPOSITORY)},
        timeout=HANG_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
    report = RankReport.read(tmp_path / "reports" / "rank_3.json")
    log = tmp_path / "logs" / "rank_3.log"
    return done.returncode, report, log.read_text() if log.is_file() else ""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("logs", "reports", "metrics"):
        (tmp_path / name).mkdir()


def test_a_rank_that_trains_to_the_end_exits_0_and_reports_no_error(tmp_path: Path) -> None:
    code, report, log = work(tmp_path, "pass")
    assert (code, report.error, report.problems) == (0, "", [])
    assert (report.rank, report.pid > 0, report.host != "") == (3, True, True)
    assert log == "before\n"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise wrong('this is wrong', 'do=that', 'do')", wrong("this is wrong", "do=that", "do")),
        ("raise does_not_fit('no room', 'make=room')", does_not_fit("no room", "make=room")),
    ],
    ids=["wrong", "does not fit"],
)
def test_a_user_error_keeps_its_code_and_fix_and_shows_no_traceback(
    tmp_path: Path, body: str, error: Exception
) -> None:
    code, report, log = work(tmp_path, body)
    (problem,) = error.problems  # type: ignore[attr-defined]
    assert code == problem.exit_code
    assert [(item["what"], item["fix"], item["exit_code"]) for item in report.problems] == [
        (problem.what, problem.fix, problem.exit_code)
    ]
    assert report.error == problem.what
    assert "Traceback" not in log
    assert problem.what in log


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "raise StoreError('EIO (Input/output error)', path='/nvme', operation='read', errno=5)",
            "StoreError: read in the store in /nvme failed: EIO (Input/output error)",
        ),
        ("raise KeyError('first line')", "KeyError: 'first line'"),
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line"),
        ("raise RuntimeError", "RuntimeError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("sys.exit(2)", "SystemExit: 2"),
    ],
)
def test_any_other_exception_exits_1_with_its_first_line_and_a_traceback_in_the_log(
    tmp_path: Path, body: str, error: str
) -> None:
    code, report, log = work(tmp_path, body)
    assert code == 1
    assert report.error == error
    assert not report.finished
    assert "Traceback" in log


def test_a_rank_trains_on_where_its_drive_takes_no_more_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank_3.log").symlink_to("/dev/full")
    body = "for stream in (sys.stdout, sys.stderr): print('after', file=stream, flush=True)"
    code, report, _ = work(tmp_path, body)
    assert (code, report.error) == (0, "")


def test_a_script_that_exits_by_itself_passes_its_code_on_without_a_traceback(tmp_path: Path) -> None:
    raising = "from muon_offload_cli.megatron.entry_point import ScriptExitError\n"
    code, report, log = work(tmp_path, f"{raising}    raise ScriptExitError('mine.py', 7)")
    assert (code, report.error, log) == (7, "exit code 7 of mine.py", "before\n")


def test_output_of_libraries_below_python_goes_to_the_log(tmp_path: Path) -> None:
    _, _, log = work(tmp_path, "import os; os.write(1, b'from C\\n'); os.write(2, b'and stderr\\n')")
    assert "from C" in log
    assert "and stderr" in log
