"""Reading a Hugging Face ``config.json``: each key that is missing or of another type is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muon_offload_cli.config.keys import example_of
from muon_offload_cli.config.locations import from_home
from muon_offload_cli.errors import Problem, command, override, wrong

KEY = "model.from_hf"
CONFIG = "config.json"
CORRECT = "download the file again, or correct the key"
MAX_FILE_BYTES = 16 * 1024**2
"""Published ones have some KiB, quantized models some hundred."""


def hf_folder(given: str) -> Path:
    """Return the absolute folder of a model.

    Raises:
        UserError: There is no such folder, or no ``config.json`` in it.
    """
    if not given:
        raise wrong(f"{KEY}= is empty.", f"{KEY}={example_of(KEY)}", KEY)
    try:
        folder = from_home(given).absolute()
        is_folder, is_file, has_config = folder.is_dir(), folder.is_file(), (folder / CONFIG).is_file()
    except (OSError, ValueError, RuntimeError):  # a NUL byte, the home of an unknown user
        folder, is_folder, is_file, has_config = Path(given[:120]), False, False, False
    if is_folder and has_config:
        return folder
    if is_file:
        fix = override(KEY, folder.parent) if folder.name == CONFIG else f"{KEY}={example_of(KEY)}"
        raise wrong(f"{KEY}={given[:120]}: {folder} is a file, not the folder of a model.", fix, KEY)
    lacks = f"there is no {CONFIG} in {folder}" if is_folder else f"there is no folder {folder}"
    raise wrong(
        f"{KEY}={given[:120]}: {lacks}.",
        f"download the model, then give its folder: hf download OWNER/NAME --local-dir /path; {KEY}=/path",
        KEY,
    )


class HfFile:
    """The values of one ``config.json``; problems are collected in `problems`.

    Args:
        path: The file, for messages.
        values: Its top, or the section of it that describes the language model.
        section: Name of that section, with a dot behind it.
    """

    def __init__(self, path: Path, values: dict[str, Any], section: str = "") -> None:
        self.path = path
        self.problems: list[Problem] = []
        self._values = values
        self._section = section

    def name_of(self, name: str) -> str:
        """Return a key's name as it stands in the file."""
        return self._section + name

    def part(self, name: str) -> HfFile | None:
        """Return a section of its own, None if there is none; its problems are told here."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            self._not(value, name, "a mapping")
            return None
        inner = HfFile(self.path, value, f"{self._section}{name}.")
        inner.problems = self.problems
        return inner

    def get(self, name: str) -> Any:
        """Return a value of any type, None if it is not there."""
        return self._values.get(name)

    def whole(self, name: str, *, default: int | None = None, optional: bool = False) -> int | None:
        """Return a whole number; ``1000000.0`` is one."""
        words = "a number without a fraction"
        value = self._present(name, words, default, optional)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self._not(value, name, words)
        return None

    def number(self, name: str, *, default: float | None = None) -> float | None:
        """Return a number."""
        value = self._present(name, "a number", default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self._not(value, name, "a number")
        return None

    def flag(self, name: str, *, default: bool | None = None) -> bool | None:
        """Return true or false."""
        value = self._present(name, "true or false", default)
        if isinstance(value, bool):
            return value
        self._not(value, name, "true or false")
        return None

    def demand(self, name: str, wanted: Any, *, default: Any, reason: str) -> None:
        """Add a problem if a value is another than the one that Megatron's layers stand for here.

        Args:
            name: The key.
            wanted: The only value that can be built.
            default: What the model's code takes where the file says nothing.
            reason: What cannot be built, for the message.
        """
        value = default if self._values.get(name) is None else self._values[name]
        if value != wanted:
            self.problem(f"{self.name_of(name)}={value} in {self.path}: {reason}.")

    def problem(self, what: str, fix: str = "take another model") -> None:
        """Add a problem, which no other value of a key mends unless `fix` says so."""
        self.problems.append(Problem(what=what.removesuffix(".") + ".", fix=fix, keys=(KEY,)))

    def _present(self, name: str, words: str, default: Any, optional: bool = False) -> Any:
        value = self._values.get(name)
        if value is not None or optional:
            return value
        if default is None:
            what = f"{self.path} has no {self.name_of(name)}, which must be {words}."
            self.problem(what, "download the file again, or add the key")
        return default

    def _not(self, value: object, name: str, words: str) -> None:
        """Tell a value that is there and of another type."""
        if value is not None:
            what = f"{self.name_of(name)}={json.dumps(value)[:80]} in {self.path} is not {words}."
            self.problem(what, CORRECT)


def read_hf_file(folder: Path) -> HfFile:
    """Read the ``config.json`` of a folder.

    Raises:
        UserError: It cannot be read, is no JSON (with line and column), or no mapping.
    """
    path = folder / CONFIG
    fix = f"download it again: {path}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise wrong(f"{path} is larger than 16 MiB, no model's description.", fix, KEY)
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise wrong(
            f"{path} cannot be read: {error.strerror}.", command("chmod", "u+r", path), KEY
        ) from error
    except json.JSONDecodeError as error:
        raise wrong(f"{path}:{error.lineno}:{error.colno}: malformed JSON: {error.msg}.", fix, KEY) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise wrong(f"{path} is no JSON text.", fix, KEY) from error
    if not isinstance(values, dict):
        raise wrong(f"{path} is {type(values).__name__} where a mapping is due.", fix, KEY)
    return HfFile(path, values)
