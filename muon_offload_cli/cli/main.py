"""The command line: parses, calls, and is the one place where errors end.

Commands import what they need inside themselves, so that ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from errno import EBADF, EIO, ENOSPC
from typing import Annotated

import typer

from muon_offload_cli.cli.bench_disk import bench_disk
from muon_offload_cli.cli.check_config import RecipeDirectories, Words, check_config
from muon_offload_cli.cli.checkpoints import checkpoints
from muon_offload_cli.cli.disk_plan import disk_plan
from muon_offload_cli.cli.doctor import doctor
from muon_offload_cli.cli.problems import print_problems, problems_as_json
from muon_offload_cli.cli.recipes import recipes
from muon_offload_cli.cli.rules import rules
from muon_offload_cli.errors import UserError, wrong
from muon_offload_cli.version import VERSION

# What a shell reports for a command that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130
# And for one whose reader went away (``| head``): 128 + SIGPIPE.
BROKEN_PIPE = 128 + signal.SIGPIPE
# Standard output lies on a drive that is full or broken: it does not fit this machine.
OUTPUT_LOST = 3

app = typer.Typer(
    name="muon-offload",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Help texts drawn with rich would triple the time that --help takes.
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"muon-offload {VERSION}")
        raise typer.Exit


@app.callback()
def _describe(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train Megatron models with Muon's optimizer state on node-local NVMe."""


@app.command()
def train(
    words: Words = None,
    recipe_dir: RecipeDirectories = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the script; start nothing.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the summary as JSON on standard output, all else on standard error."
        ),
    ] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Run it small on CPU ranks of this machine: straight, killed and resumed."
        ),
    ] = False,
) -> None:
    """Train a recipe: muon-offload train recipe=tiny."""
    from muon_offload_cli.cli.train import train_command

    if rehearse:
        from muon_offload_cli.cli.rehearse import rehearse_command

        if dry_run:
            raise wrong("--rehearse and --dry-run exclude each other.", "leave one of them out")
        raise typer.Exit(rehearse_command(words or [], recipe_directories=recipe_dir or [], json=json))
    raise typer.Exit(
        train_command(words or [], recipe_directories=recipe_dir or [], dry_run=dry_run, json=json)
    )


app.command("check-config")(check_config)
app.command("disk-plan")(disk_plan)
app.command("bench-disk")(bench_disk)
app.command("doctor")(doctor)
app.command("recipes")(recipes)
app.command("checkpoints")(checkpoints)
app.command("rules")(rules)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Returns:
        0 fine, 1 a bug of ours (with its traceback), 2 the request is wrong, 3 it does not fit this
        machine, 4 the training job failed, 5 training was asked to end, saved and ended, 130 interrupted,
        141 the reader of the output went away.
    """
    try:
        return _answer(arguments)
    except (BrokenPipeError, SystemExit) as error:
        # Typer and rich answer a reader that went away with an exit of their own.
        if not isinstance(error.__context__ or error, BrokenPipeError):
            raise
        _discard_output()
        return BROKEN_PIPE


def _answer(arguments: Sequence[str]) -> int:
    """Run one command; telling what it ran into may itself find that the reader is gone."""
    try:
        _refuse_empty(arguments)
        result = app(list(arguments), prog_name="muon-offload", standalone_mode=False)
    except UserError as error:
        return _tell(error, arguments)
    except (BrokenPipeError, SystemExit):
        raise
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the one boundary
        return _usage_error(error) or _unwritable(error) or _nowhere(error, arguments) or _bug()
    return result if isinstance(result, int) else 0


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse arguments without a character: as a path, one would mean the folder that the user is in."""
    for before, given in zip(("", *arguments), arguments, strict=False):
        if not given or (given.startswith("--") and given.endswith("=")):
            name = given or f"{before} ''".lstrip()
            raise wrong(
                f"{name}: the argument is empty.", "leave it out, or give . for the folder that you are in"
            )


def _tell(error: UserError, arguments: Sequence[str]) -> int:
    # Asked of the words themselves: the error may come from before options were read.
    if "--json" in arguments:
        typer.echo(problems_as_json(error.problems))
    else:
        print_problems(error.problems)
    return error.exit_code


def _nowhere(error: Exception, arguments: Sequence[str]) -> int | None:
    """Say that the working folder is gone and return the code; None if it is something else."""
    if not isinstance(error, FileNotFoundError):
        return None
    try:
        os.getcwd()  # noqa: PTH109 - which is what Hydra asks
    except FileNotFoundError:
        return _tell(wrong("the folder that you are in was deleted.", "cd to one that exists"), arguments)
    return None


def _discard_output() -> None:
    """Let what is still to be written go nowhere, on streams that take no more: at exit it would complain."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            stream.flush()
        except (OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, stream.fileno())
            except (OSError, ValueError):  # a stream without a descriptor
                setattr(sys, name, None)
            finally:
                os.close(nowhere)


def _usage_error(error: Exception) -> int | None:
    """Show an error of the option parser and return its code; None if it is something else.

    Told by shape: the parser's exceptions are Click's or Typer's own copy of them, by version.
    """
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if not callable(show) or not isinstance(code, int):
        return None
    show()
    return code


def _unwritable(error: Exception) -> int | None:
    """Say that standard output takes no more and return the code; None if it is something else.

    An error of a file names the file; one of a stream that is open already does not.
    """
    if (
        not isinstance(error, OSError)
        or error.errno not in (ENOSPC, EIO, EBADF)
        or error.filename is not None
    ):
        return None
    _discard_output()
    with contextlib.suppress(OSError):
        typer.echo(f"error: standard output cannot be written: {error.strerror}.", err=True)
    return OUTPUT_LOST


def _bug() -> int:
    traceback.print_exc()
    typer.echo("This is a bug in muon-offload; please report it with the lines above.", err=True)
    return 1


def main() -> None:
    """Run the command line of this process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Closed by the shell (``>&-``): nothing that is said there has a reader.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - open until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            # A terminal that knows only ASCII gets question marks, not a traceback.
            stream.reconfigure(errors="replace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        code = BROKEN_PIPE
    except OSError as error:
        code = _unwritable(error) or code
    sys.exit(code)


if __name__ == "__main__":
    main()
