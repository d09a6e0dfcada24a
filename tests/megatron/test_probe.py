"""What is said of a Megatron that is there, missing or a stub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from muon_offload_cli.config.rules.flags import EVERYWHERE
from tests.fakes.fake_torchrun import HANG_S

REPOSITORY = Path(__file__).parents[2]


def probe(*first_on_path: Path) -> dict[str, Any]:
    path = os.pathsep.join(map(str, [*first_on_path, REPOSITORY]))
    done = subprocess.run(
        [sys.executable, "-m", "muon_offload_cli.megatron.probe"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def stub(folder: Path, *packages: str) -> Path:
    """Put empty packages where real ones would be found."""
    for package in packages:
        path = folder.joinpath(*package.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").touch()
    return folder


def test_the_installed_megatron_trains_muon() -> None:
    answer = probe()
    assert answer["problems"] == []
    assert answer["megatron_version"].startswith("0.")
    assert {"--optimizer", "--muon-momentum", "--tensor-model-parallel-size"} <= set(answer["flags"])
    assert {f"--{flag.replace('_', '-')}" for flag in EVERYWHERE} <= set(answer["flags"])
    assert answer["flags"]["--log-interval"] == {"nargs": None, "kind": "int", "choices": []}
    assert answer["flags"]["--recompute-granularity"]["choices"] == ["full", "selective"]
    assert answer["flags"]["--bf16"]["nargs"] == 0


def test_a_stub_of_megatron_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    answer = probe(stub(tmp_path, "megatron", "megatron.core"))
    assert answer["megatron_version"] is None
    assert 'pip install "megatron-core==0.19.2"' in [problem["fix"] for problem in answer["problems"]]
