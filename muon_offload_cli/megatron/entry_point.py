"""Running a training script of the user's own in this process, as ``python SCRIPT ARGUMENTS`` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from muon_offload_cli.config.locations import from_home
from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron.substitute import Substitutions

KEY = "megatron.entrypoint"


class ScriptExitError(Exception):
    """The script ended by an exit code of its own other than 0.

    Attributes:
        code: That code.
    """

    def __init__(self, script: str, code: int, said: str = "") -> None:
        super().__init__(f"exit code {code} of {script}{': ' if said else ''}{said}")
        self.code = code


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run `script` as the main program, with its folder first on the path; returns when it ends well.

    Args:
        script: Path of a Python file; ``~`` is the user's home.
        arguments: Its command line.

    Raises:
        UserError: There is no such file.
        ScriptExitError: It called ``sys.exit`` with anything but 0 and None.
    """
    path = from_home(script)
    if not path.is_file():
        raise wrong(f"{KEY}={script} is no file on this node.", f"{KEY}=/path/to/pretrain.py", KEY)
    with Substitutions() as stack:
        stack.replace(sys, "path", [str(path.absolute().parent), *sys.path])
        stack.replace(sys, "argv", [str(path), *arguments])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as leaving:
            code = leaving.code
            if not code:
                return
            if isinstance(code, int):
                raise ScriptExitError(path.name, code) from leaving
            # Python prints anything else, and exits with 1.
            print(code, file=sys.stderr, flush=True)
            raise ScriptExitError(path.name, 1, str(code).partition("\n")[0]) from leaving
