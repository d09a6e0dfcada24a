"""Asking Megatron what it is and has, in a process of its own, and remembering the answer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muon_offload_cli.config import probe_cache
from muon_offload_cli.config.locations import from_home
from muon_offload_cli.config.rules.facts import FlagFacts, MegatronFacts
from muon_offload_cli.config.rules.flags import EVERYWHERE, LAYOUT_OPT_IN
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Problem, command
from muon_offload_cli.machine.devices import gpu_count

PROBE_MODULE = "muon_offload_cli.megatron.probe"
# Importing torch and Megatron takes 3 s on an idle machine, and a minute from a cold network disk.
PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What the probe said; None for what it could not say.

    Attributes:
        megatron: The software at hand.
        cuda_available: Whether torch sees a GPU.
        num_gpus: How many.
        problems: What keeps anything from training.
        muon_problems: What keeps Muon from training.
    """

    megatron: MegatronFacts | None = None
    cuda_available: bool | None = None
    num_gpus: int | None = None
    problems: tuple[Problem, ...] = ()
    muon_problems: tuple[Problem, ...] = ()


def needs_probe(config: Config, *, here: bool) -> bool:
    """Tell whether a rule needs Megatron's parser or torch, which take seconds to import.

    Args:
        config: The composed run.
        here: The run is meant for this machine, so that its GPUs matter.
    """
    return (
        any(name.replace("-", "_") not in EVERYWHERE for name in config.megatron.args)
        or config.megatron.path is not None
        or config.optimizer.name == "adaptive_muon"
        or (here and config.device is Device.cuda)
    )


def missing_parts(path: str) -> tuple[str, ...]:
    """Return which folders of a Megatron checkout are not below `path`."""
    root = from_home(path)
    return tuple(name for name in ("megatron/core", "megatron/training") if not _is_folder(root / name))


def has_compact_layout(megatron_path: str | None) -> bool:
    """Tell whether a Megatron lays Muon's parameters out compactly where its flag does not say otherwise.

    Looked up in the source of its parser, because importing that takes seconds.

    Args:
        megatron_path: The checkout; None: the installed package.
    """
    installed = importlib.util.find_spec("megatron") if megatron_path is None else None
    roots = list(installed.submodule_search_locations or []) if installed is not None else []
    if megatron_path is not None:
        roots.append(str(from_home(megatron_path) / "megatron"))
    for root in roots:
        try:
            source = (Path(root) / "training/arguments.py").read_text(encoding="utf-8")
            return f"'{LAYOUT_OPT_IN}'" in source.replace('"', "'")
        except (OSError, ValueError):  # not there, or a path that cannot be one
            continue
    return False


def ask_megatron(
    megatron_path: str | None = None,
    *,
    timeout_s: float = PROBE_TIMEOUT_S,
    command: Sequence[str] | None = None,
    cache: Path | None = None,
) -> ProbeReport:
    """Return what the probe says, from `cache` if nothing that it looks at has changed.

    Args:
        megatron_path: A checkout that goes before the installed package.
        timeout_s: How long it may take.
        command: Another command in its place, for tests.
        cache: File with earlier answers; None: ask in any case and keep nothing.

    Returns:
        What it said; a probe that failed or hung is a problem of exit code 3.
    """
    roots = [str(from_home(megatron_path))] if megatron_path else []
    key = "" if cache is None else probe_cache.fingerprint([*roots, "", *sys.path])
    kept = probe_cache.load(cache, key) if key else None
    if kept is not None:
        report = read_answer(_with_present_gpus(kept))
        known = report.megatron
        if (
            known is not None
            and known.version
            and known.flags
            and not (report.problems or report.muon_problems)
        ):
            return report
    arguments = list(command) if command is not None else [sys.executable, "-m", PROBE_MODULE]
    try:
        done = subprocess.run(
            arguments,
            env=importing(megatron_path),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"gave no answer in {timeout_s:g} s", arguments)
    except OSError as error:
        return _failed(f"could not be started ({error.strerror})", arguments)
    answer = last_object(done.stdout)
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return _failed(f"exited with {done.returncode}: {last[:300]}", arguments)
    report = read_answer(answer)
    if key and not report.problems and not report.muon_problems:
        probe_cache.store(cache, key, answer)
    return report


def _with_present_gpus(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a kept answer with the GPUs of now: they change without any file changing."""
    gpus = gpu_count() if answer.get("torch_cuda") else 0
    return answer | {"cuda_available": gpus > 0, "num_gpus": gpus}


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


CLEARED = {
    "PYTHONOPTIMIZE": "with docstrings taken out, transformers and Megatron do not import",
    "PYTHONWARNINGS": "imports of Megatron warn, and made errors these would end every rank",
}
"""Variables that no process which imports Megatron may inherit, with the reasons."""


def python_path(megatron_path: str | None, inherited: str, base: Path) -> str:
    """Return the PYTHONPATH of a process that imports Megatron, every entry absolute; empty: none is needed.

    Args:
        megatron_path: A checkout that goes before everything else.
        inherited: PYTHONPATH of this process.
        base: Folder that relative entries start from.
    """
    entries = filter(None, [megatron_path, *inherited.split(os.pathsep)])
    return os.pathsep.join(os.path.normpath(base / from_home(entry)) for entry in entries)


def importing(megatron_path: str | None) -> dict[str, str]:
    """Return the environment of a process that imports Megatron as the ranks would."""
    inherited = {name: value for name, value in os.environ.items() if name not in CLEARED}
    path = python_path(megatron_path, inherited.get("PYTHONPATH", ""), Path.cwd())
    return inherited | ({"PYTHONPATH": path} if path else {})


def last_object(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object: imports may print lines of their own before it."""
    for line in reversed(text.strip().splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def read_answer(answer: dict[str, Any]) -> ProbeReport:
    """Turn the probe's JSON into facts; values of another type than expected count as not known."""
    flags = _flags(answer.get("flags"))
    steps = answer.get("newton_schulz")
    version = answer.get("megatron_version")
    cuda, gpus = answer.get("cuda_available"), answer.get("num_gpus")
    return ProbeReport(
        megatron=MegatronFacts(
            version=_text(version),
            root=_text(answer.get("megatron_root")),
            flags=flags or None,
            chunked_offloader=answer.get("chunked_offloader") is True,
            offloader_lacks=tuple(_texts(answer.get("offloader_lacks"))),
            layer_wise=answer.get("layer_wise") is True,
            torch_version=_text(answer.get("torch_version")),
            torch_cuda=_text(answer.get("torch_cuda")),
            transformer_engine=answer.get("transformer_engine") is True,
            optimizers_version=_text(answer.get("optimizers_version")),
            newton_schulz={
                str(name): frozenset(step for step in runs if isinstance(step, int))
                for name, runs in (steps.items() if isinstance(steps, dict) else ())
                if isinstance(runs, list)
            },
            adaptive_muon=answer["adaptive_muon"] if isinstance(answer.get("adaptive_muon"), str) else None,
        )
        if version or "torch_version" in answer
        else None,
        cuda_available=cuda if isinstance(cuda, bool) else None,
        num_gpus=gpus if isinstance(gpus, int) else None,
        problems=_problems(answer.get("problems")),
        muon_problems=_problems(answer.get("muon_problems")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _flags(value: Any) -> dict[str, FlagFacts]:
    """Return what the parser takes after each flag, by its name with underscores."""
    found = {}
    for option, takes in value.items() if isinstance(value, dict) else ():
        if not isinstance(takes, dict):
            continue
        nargs, choices = takes.get("nargs"), takes.get("choices")
        found[str(option).lstrip("-").replace("-", "_")] = FlagFacts(
            nargs=nargs if isinstance(nargs, int | str) else None,
            kind=_text(takes.get("kind")) or "",
            choices=tuple(each for each in choices if isinstance(each, str | int | float))
            if isinstance(choices, list)
            else (),
        )
    return found


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _problems(value: Any) -> tuple[Problem, ...]:
    return tuple(
        Problem(what=str(item.get("what", "")), fix=str(item.get("fix", "")), exit_code=3)
        for item in (value if isinstance(value, list) else [])
        if isinstance(item, dict)
    )


def _failed(reason: str, arguments: Sequence[str]) -> ProbeReport:
    shown = command(*arguments)
    return ProbeReport(
        problems=(
            Problem(
                what=f"asking Megatron for its flags failed: the probe {reason}.",
                fix=f"see: {shown}",
                exit_code=3,
            ),
        )
    )
