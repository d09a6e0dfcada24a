"""A script of the user's own as the main program of a process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.entry_point import ScriptExitError, run_script


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "pretrain_mine.py"
    path.write_text(body)
    return str(path)


def test_a_script_sees_what_python_would_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_mine.py").write_text("WORD = 'a neighbour'\n")
    script(
        tmp_path,
        "import sys\nfrom beside_mine import WORD\n"
        "if __name__ == '__main__':\n    print(WORD, sys.argv, sys.modules['__main__'].__file__)\n",
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    before = sys.argv, sys.path, sys.modules["__main__"]
    run_script("~/pretrain_mine.py", ["--a", "3"])
    mine = str(tmp_path / "pretrain_mine.py")
    assert capsys.readouterr().out == f"a neighbour {[mine, '--a', '3']} {mine}\n"
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)", "sys.exit(False)"])
def test_a_script_that_ends_well_returns(tmp_path: Path, ending: str) -> None:
    run_script(script(tmp_path, f"import sys\n{ending}\n"), [])


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(7)", 7, "exit code 7 of pretrain_mine.py"),
        ("sys.exit('no data\\nat all')", 1, "exit code 1 of pretrain_mine.py: no data"),
        ("sys.exit(['odd'])", 1, "exit code 1 of pretrain_mine.py: ['odd']"),
    ],
)
def test_a_script_that_exits_otherwise_tells_its_code_and_words(
    tmp_path: Path, ending: str, code: int, said: str
) -> None:
    with pytest.raises(ScriptExitError) as caught:
        run_script(script(tmp_path, f"import sys\n{ending}\n"), [])
    assert (caught.value.code, str(caught.value)) == (code, said)


def test_an_exception_of_the_script_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        run_script(script(tmp_path, "raise KeyError('mine')\n"), [])


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_no_file_on_this_node_is_a_user_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"megatron\.entrypoint=.* is no file on this node"):
        run_script(str(tmp_path / name), [])
