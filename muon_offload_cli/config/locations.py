"""Where the shipped configuration lies: in the wheel's data folder, else beside the checkout.

The wheel carries `conf/` and `recipes/` inside the package (``data/``), because they are no Python
packages and would otherwise land in site-packages under names that anybody could use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from muon_offload_cli.errors import does_not_fit, wrong

_PACKAGE = Path(__file__).resolve().parent.parent
RECIPE_SUFFIXES = (".yaml", ".yml")


def shipped_directory(name: str) -> Path:
    """Return the folder `name` (``conf`` or ``recipes``) that was installed or checked out.

    Raises:
        UserError: Neither place has it, so the installation is broken.
    """
    for root in (_PACKAGE / "data", _PACKAGE.parent):
        if (root / name).is_dir():
            return root / name
    raise wrong(
        f"the installation has no {name}/ folder below {_PACKAGE / 'data'} or beside {_PACKAGE}.",
        "install again: pip install --force-reinstall muon-offload",
    )


def find_recipes(recipe_directories: Sequence[Path] = ()) -> dict[str, Path]:
    """Return recipe files by name; folders given first win over later ones and the shipped ones.

    Raises:
        UserError: A folder that was given does not exist or cannot be listed.
    """
    for directory in recipe_directories:
        if not directory.is_dir():
            raise wrong(f"--recipe-dir {directory} is no folder.", "give a folder that holds recipe files")
    found: dict[str, Path] = {}
    for directory in (*recipe_directories, shipped_directory("recipes")):
        try:
            files = sorted(directory.iterdir())
        except OSError as error:
            raise wrong(f"the recipe folder {directory} cannot be listed: {error.strerror}.") from error
        for path in files:
            if path.suffix in RECIPE_SUFFIXES:
                found.setdefault(path.stem, path)
    return found


def group_options() -> dict[str, dict[str, Path]]:
    """Return the parts below ``conf/``: file by option name, by group name."""
    return {
        group.name: {path.stem: path for path in sorted(group.glob("*.yaml"))}
        for group in sorted(shipped_directory("conf").iterdir())
        if group.is_dir()
    }


def default_runs_directory(recipe: str) -> Path:
    """Return where, below the working folder, a recipe's runs are if `run.directory` is null."""
    return Path("runs") / recipe


def default_cache_directory() -> Path:
    """Return where prepared tokens go if `data.cache_directory` is null: in the user's cache folder.

    Raises:
        UserError: The user has no home.
    """
    # The XDG base directory specification has relative values ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "muon-offload"
    try:
        return Path.home() / ".cache" / "muon-offload"
    except RuntimeError as error:
        raise does_not_fit(
            "data.cache_directory is not set and this user has no home directory.",
            "data.cache_directory=/path/to/cache",
            "data.cache_directory",
        ) from error


def default_offload_directory() -> Path:
    """Return where state goes if `offload.directory` is null.

    ``$SCRATCH/muon_offload``, else ``/tmp/muon_offload_<uid>``, the latter only if ``/tmp`` is a real
    disk: a tmpfs is the memory that the state is meant to leave.

    Raises:
        UserError: SCRATCH is not set and ``/tmp`` is held in memory, or SCRATCH is no absolute path.
    """
    scratch = os.environ.get("SCRATCH", "")
    if scratch:
        if not Path(scratch).is_absolute():
            raise wrong(
                f"offload.directory is not set and SCRATCH={scratch} is no absolute path.",
                "offload.directory=/absolute/folder/on/a/local/drive",
                "offload.directory",
            )
        return Path(scratch) / "muon_offload"
    kind = _kind_of_memory(Path("/tmp"))
    if kind is not None:
        raise does_not_fit(
            f"offload.directory is not set, SCRATCH is not set, and /tmp is a {kind}: memory, not a disk.",
            "offload.directory=/absolute/folder/on/a/local/drive",
            "offload.directory",
        )
    return Path("/tmp") / f"muon_offload_{os.getuid()}"


def _kind_of_memory(path: Path) -> str | None:
    """Return the type of the filesystem below `path` if it lives in memory, else None."""
    from muon_offload_cli.machine.filesystem import inspect

    mount = inspect(path)
    return mount.kind if mount.is_memory else None


def from_home(path: str) -> Path:
    """Return a path with its ``~`` replaced; as it is given where that is the home of an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
