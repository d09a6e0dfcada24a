"""The set-up finds a Python that runs, not only one that is on PATH."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "find_python.sh"


def interpreter(path: Path, *, works: bool) -> Path:
    """Write a stand-in: one that passes on to this interpreter and gives its own path, or a dead shim."""
    path.parent.mkdir(parents=True, exist_ok=True)
    real = f'case "$2" in *print*) echo {path};; *) exec {sys.executable} "$@";; esac'
    dead = "echo 'pyenv: command not found' >&2; exit 127"
    path.write_text(f"#!/bin/sh\n{real if works else dead}\n")
    path.chmod(0o755)
    return path


def find(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{tmp_path}/first:{tmp_path}/second"
    return subprocess.run(
        ["/bin/sh", SCRIPT],
        env={"HOME": str(tmp_path / "home"), "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    if Path("/usr/local/bin/python3.12").exists():
        pytest.skip("this machine has a python3.12 outside PATH, where the script looks too")
    return tmp_path


def test_a_shim_that_does_not_run_is_passed_over_for_the_next_on_path(bare):
    interpreter(bare / "first/python3.12", works=False)
    works = interpreter(bare / "second/python3.12", works=True)
    assert find(bare).stdout.strip() == str(works)


def test_pyenv_s_own_folder_is_searched_where_path_has_only_shims(bare):
    interpreter(bare / "first/python3.12", works=False)
    works = interpreter(bare / "home/.pyenv/versions/3.12.1/bin/python3", works=True)
    assert find(bare).stdout.strip() == str(works)
    moved = interpreter(bare / "pyenv/versions/3.12.9/bin/python3", works=True)
    assert find(bare, PYENV_ROOT=str(bare / "pyenv")).stdout.strip() == str(moved)


def test_the_reference_version_is_preferred_to_a_newer_one(bare):
    interpreter(bare / "first/python3.13", works=True)
    works = interpreter(bare / "second/python3.12", works=True)
    assert find(bare).stdout.strip() == str(works)


def test_without_any_the_way_to_get_one_is_told_in_one_line(bare):
    if any(Path(f"/usr/local/bin/python3.{minor}").exists() for minor in (13, 14)):
        pytest.skip("this machine has a newer Python outside PATH, where the script looks too")
    result = find(bare)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "pyenv install 3.12" in result.stderr


def test_a_python_that_was_named_is_taken_or_refused(bare):
    interpreter(bare / "first/python3.12", works=True)
    named = interpreter(bare / "mine", works=True)
    assert find(bare, PYTHON=str(named)).stdout.strip() == str(named)
    result = find(bare, PYTHON=str(interpreter(bare / "bad", works=False)))
    assert result.returncode == 1
    assert f"PYTHON={bare}/bad" in result.stderr
