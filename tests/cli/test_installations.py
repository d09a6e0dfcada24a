"""Missing, old and stub packages are refused with a fix before any rank starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import fake_torchrun
import pytest

from tests.fakes.fake_torchrun import HANG_S

COMMAND = [sys.executable, "-m", "muon_offload_cli.cli.main"]
MUON_MODULE = "emerging_optimizers/orthogonalized_optimizers"
GOOD_MUON = (fake_torchrun.STANDIN / MUON_MODULE / "__init__.py").read_text()
GOOD_STEPS = (fake_torchrun.STANDIN / MUON_MODULE / "muon_utils.py").read_text()
MISSING = "raise ModuleNotFoundError(\"No module named 'emerging_optimizers'\")\n"


def site(root: Path, files: dict[str, str]) -> Path:
    """Write a small site directory to go first on the path: the packages named, as in the stand-ins."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run(tmp_path: Path, files: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command where `files` go before the stand-ins for torch, Megatron and emerging-optimizers."""
    environment = fake_torchrun.environment({"steps": 1})
    environment["PYTHONPATH"] = f"{site(tmp_path / 'site', files)}:{environment['PYTHONPATH']}"
    return subprocess.run(
        [*COMMAND, *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def train(tmp_path: Path, files: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    words = ["recipe=tiny", "device=cpu", "train.steps=1", f"offload.directory={tmp_path}"]
    return run(tmp_path, files, "train", *words, f"run.directory={tmp_path}/run", *more)


def with_megatron(name: str, text: str) -> dict[str, str]:
    """A whole Megatron in which one file differs: a package of its own hides the one behind it."""
    folder = fake_torchrun.STANDIN
    whole = {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted((folder / "megatron").rglob("*.py"))
    }
    return whole | {name: text}


BROKEN = {
    "missing optimizers": ({"emerging_optimizers/__init__.py": MISSING}, "emerging-optimizers==0.3.0"),
    "empty stub": ({"emerging_optimizers/__init__.py": ""}, "emerging-optimizers==0.3.0"),
    "old optimizers": (
        {
            "emerging_optimizers/__init__.py": "",
            f"{MUON_MODULE}/__init__.py": "class OrthogonalizedOptimizer:\n    pass\n",
        },
        "emerging-optimizers==0.3.0",
    ),
    "names that are no functions": (
        {
            "emerging_optimizers/__init__.py": "",
            f"{MUON_MODULE}/__init__.py": GOOD_MUON,
            f"{MUON_MODULE}/muon_utils.py": "newton_schulz_tp = None\n",
        },
        "emerging-optimizers==0.3.0",
    ),
    "functions that run nothing": (
        {
            "emerging_optimizers/__init__.py": "",
            f"{MUON_MODULE}/__init__.py": GOOD_MUON,
            f"{MUON_MODULE}/muon_utils.py": GOOD_STEPS.replace("return x", "raise ValueError(x)"),
        },
        "emerging-optimizers==0.3.0",
    ),
    "Megatron that trips over a stub": (
        with_megatron("megatron/core/__init__.py", "import emerging_optimizers.scalar\n")
        | {"emerging_optimizers/__init__.py": ""},
        "emerging-optimizers==0.3.0",
    ),
    "no Megatron": (
        with_megatron("megatron/core/__init__.py", "raise ImportError('no megatron.core here')\n"),
        "megatron-core==0.19.2",
    ),
    "Megatron without training": (
        with_megatron("megatron/training/arguments.py", "raise ImportError('no training here')\n"),
        "megatron-core==0.19.2",
    ),
    "Megatron before layer-wise": (
        with_megatron("megatron/core/optimizer/layer_wise_optimizer.py", "raise ImportError('too old')\n"),
        "megatron-core==0.19.2",
    ),
    "Megatron before Muon": (
        with_megatron("megatron/core/optimizer/emerging_optimizers.py", ""),
        "megatron-core==0.19.2",
    ),
    "Megatron with another wrapper": (
        with_megatron("megatron/core/optimizer/layer_wise_optimizer.py", ""),
        "megatron-core==0.19.2",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_train_refuses_a_broken_installation_before_any_rank_starts(tmp_path: Path, kind: str) -> None:
    files, fix = BROKEN[kind]
    done = train(tmp_path, files)
    assert done.returncode == 3, done.stderr
    assert f'fix: pip install "{fix}"' in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_train_starts_where_everything_is_there(tmp_path: Path) -> None:
    done = train(tmp_path, {})
    assert done.returncode == 0, done.stderr


def test_a_broken_probe_is_told_by_its_last_words(tmp_path: Path) -> None:
    done = train(tmp_path, {"torch/__init__.py": "raise OSError('libcudart.so: cannot open')\n"})
    assert done.returncode == 3
    assert "libcudart.so: cannot open" in done.stderr
    assert "Traceback" not in done.stderr


def test_resident_adam_does_without_emerging_optimizers(tmp_path: Path) -> None:
    files, _ = BROKEN["missing optimizers"]
    done = run(
        tmp_path, files, "check-config", "recipe=tiny", "optimizer=adam", "offload=none", "device=cuda"
    )
    assert "emerging-optimizers" not in done.stderr


def test_a_probe_that_failed_once_is_not_remembered(tmp_path: Path) -> None:
    files, _ = BROKEN["missing optimizers"]
    assert train(tmp_path, files).returncode == 3
    (tmp_path / "site" / "emerging_optimizers" / "__init__.py").unlink()
    shutil.rmtree(tmp_path / "site" / "emerging_optimizers")
    assert train(tmp_path, {}).returncode == 0


def test_flags_are_checked_against_the_parser_at_hand(tmp_path: Path) -> None:
    done = run(
        tmp_path, {}, "check-config", "recipe=tiny", "megatron.args.recompute_granulity=full", "--json"
    )
    (problem,) = json.loads(done.stdout)
    assert (done.returncode, problem["rule"]) == (2, "flag-unknown")
    assert problem["fix"] == "megatron.args.recompute_granularity=..."


def test_a_path_that_is_no_megatron_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    done = run(tmp_path, {}, "check-config", "recipe=tiny", f"megatron.path={tmp_path}")
    assert done.returncode == 2
    assert f"megatron.path={tmp_path} is no Megatron: it has no megatron/core" in done.stderr


def test_doctor_says_what_is_broken_and_how_to_mend_it(tmp_path: Path) -> None:
    files, fix = BROKEN["missing optimizers"]
    done = run(tmp_path, files, "doctor", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 3
    assert (rows["Muon"]["state"], rows["Muon"]["fix"]) == ("broken", f'pip install "{fix}"')
    assert rows["Megatron"]["state"] == "fine"
