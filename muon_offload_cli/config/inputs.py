"""Looking at what a run reads: data files, a training script, a pretrained model."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

from muon_offload_cli.config.probing import missing_parts
from muon_offload_cli.config.rules.facts import FileFacts, PretrainedFacts
from muon_offload_cli.units import MIB

WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")

LONGEST_SCRIPT_BYTES = 16 * MIB
"""A longer one is not looked into."""


def megatron_beside(script: str, megatron_path: str | None) -> str | None:
    """Return the folder of a script if a Megatron lies in it that is not the one that is used."""
    try:
        folder = Path(script).expanduser().absolute().parent
        used = None if megatron_path is None else Path(megatron_path).expanduser().resolve()
        return None if folder.resolve() == used or missing_parts(str(folder)) else str(folder)
    except (OSError, ValueError, RuntimeError):  # as for `look_at_file`
        return None


def look_at_pretrained(folder: Path) -> PretrainedFacts:
    """Return what the folder of a Hugging Face model holds; what cannot be read counts as not there."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        names = set()
    try:
        index = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        listed = sorted({str(name) for name in index.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = [WEIGHTS_INDEX] if WEIGHTS_INDEX in names else []
        names -= {WEIGHTS_INDEX}
    return PretrainedFacts(
        weight_files=sum(name.endswith(".safetensors") for name in names),
        missing=tuple(name for name in listed if name not in names),
        tokenizer=not names.isdisjoint(TOKENIZER_FILES),
        bridge=_is_installed("megatron.bridge"),
        transformers=_is_installed("transformers"),
    )


def _is_installed(module: str) -> bool:
    try:
        # Its parent is imported, which for megatron is an empty namespace.
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def look_at_file(name: str) -> FileFacts:
    """Return the facts of a file; one that cannot be looked at counts as not there."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return FileFacts(num_bytes=None, is_folder=True)
        return FileFacts(num_bytes=path.stat().st_size, readable=os.access(path, os.R_OK))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: ~ of an unknown user
        return FileFacts(num_bytes=None)


def look_at_script(name: str) -> FileFacts:
    """Return the facts of a training script; nothing of it is run."""
    found = look_at_file(name)
    if not found.num_bytes or found.num_bytes > LONGEST_SCRIPT_BYTES or not found.readable:
        return found
    try:
        return replace(found, not_python=_why_not_python(Path(name).expanduser()))
    except OSError:
        return replace(found, readable=False)


def _why_not_python(path: Path) -> str:
    """Compile a script, as Python does before it runs anything of it; return what hinders that."""
    source = path.read_bytes()
    if source.startswith(importlib.util.MAGIC_NUMBER) or zipfile.is_zipfile(path):
        return ""  # `runpy` runs compiled files and archives as well.
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, str(path), "exec", dont_inherit=True)
            tree = ast.parse(source)
    except SyntaxError as error:
        return f"is not Python: {'' if error.lineno is None else f'line {error.lineno}: '}{error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"is not Python: {error or type(error).__name__}"
    statements = tree.body if ast.get_docstring(tree, clean=False) is None else tree.body[1:]
    return "" if statements else "has no statement, only comments"
