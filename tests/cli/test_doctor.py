"""The doctor's rows: each thing is fine, worth a warning, or broken with a fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from muon_offload_cli.cli.doctor import _candidates, _draw
from muon_offload_cli.cli.main import run
from muon_offload_cli.config.diagnosis import Finding, Machine, State, diagnose, scratch_paths
from muon_offload_cli.config.probing import ProbeReport
from muon_offload_cli.config.rules import DirectoryFacts, MegatronFacts
from muon_offload_cli.config.rules.facts import FlagFacts
from muon_offload_cli.errors import Problem
from muon_offload_cli.machine.limits import ProcessLimits
from muon_offload_cli.machine.memory import HostMemory
from muon_offload_cli.units import GIB

DRIVE = DirectoryFacts(
    path=Path("/nvme/s"),
    nearest=Path("/nvme"),
    mount_point=Path("/nvme"),
    kind="xfs",
    free_bytes=100 * GIB,
    direct_io=True,
    write_error="",
)
SOFTWARE = MegatronFacts(
    version="0.19.2",
    root="/site",
    flags={"lr": FlagFacts()},
    layer_wise=True,
    torch_version="2.14",
    torch_cuda="13.0",
    optimizers_version="0.3.0",
    newton_schulz={"quintic": frozenset({5}), "custom": frozenset()},
)
MEMORY = HostMemory(
    total_bytes=64 * GIB,
    available_bytes=60 * GIB,
    limit_bytes=32 * GIB,
    used_bytes=GIB,
    headroom_bytes=31 * GIB,
)
GOOD = Machine(
    python=(3, 12, 1),
    executable="/bin/python",
    report=ProbeReport(megatron=SOFTWARE, cuda_available=True, num_gpus=8),
    gpus=8,
    memory=MEMORY,
    cgroup_version=2,
    limits=ProcessLimits(open_files=65536, max_maps=65530),
    scratch=[DRIVE],
)


def rows(machine: Machine) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(machine)}


def test_a_good_machine_is_fine_in_every_row() -> None:
    found = rows(GOOD)
    assert {finding.state for finding in found.values()} == {State.FINE}
    assert {finding.fix for finding in found.values()} == {""}
    for name, words in {
        "Python": "3.12.1",
        "torch": "CUDA 13.0",
        "Megatron": "has layer-wise Muon, no chunked offloader",
        "emerging-optimizers": "coefficients quintic",
        "GPUs": "8",
        "host memory": "64.00 GiB",
        "memory limit": "32.00 GiB, 1.00 GiB used (cgroup v2)",
        "open files": "65536",
        "max_map_count": "65530",
        "memlock": "no limit",
        "scratch /nvme/s": "xfs on /nvme, 100.00 GiB free, O_DIRECT",
    }.items():
        assert words in found[name].found


@pytest.mark.parametrize(
    ("name", "state", "machine"),
    [
        ("Python", State.BROKEN, replace(GOOD, python=(3, 11, 9))),
        (
            "Megatron",
            State.BROKEN,
            replace(GOOD, report=ProbeReport(problems=(Problem(what="none", fix="pip"),))),
        ),
        (
            "Muon",
            State.BROKEN,
            replace(GOOD, report=ProbeReport(muon_problems=(Problem(what="a stub", fix="pip"),))),
        ),
        ("GPUs", State.WARNING, replace(GOOD, gpus=0)),
        (
            "GPUs",
            State.BROKEN,
            replace(GOOD, report=ProbeReport(megatron=SOFTWARE, cuda_available=False, num_gpus=0)),
        ),
        ("host memory", State.WARNING, replace(GOOD, memory=replace(MEMORY, headroom_bytes=GIB))),
        ("host memory", State.WARNING, replace(GOOD, memory=None)),
        ("open files", State.WARNING, replace(GOOD, limits=replace(GOOD.limits, open_files=1024))),
        ("open files", State.BROKEN, replace(GOOD, limits=replace(GOOD.limits, open_files=64))),
        ("file size", State.BROKEN, replace(GOOD, limits=replace(GOOD.limits, file_bytes=GIB - 1))),
        ("file size", State.WARNING, replace(GOOD, limits=replace(GOOD.limits, file_bytes=GIB))),
        ("address space", State.BROKEN, replace(GOOD, limits=replace(GOOD.limits, address_bytes=4 * GIB))),
        ("address space", State.WARNING, replace(GOOD, limits=replace(GOOD.limits, address_bytes=64 * GIB))),
        ("max_map_count", State.WARNING, replace(GOOD, limits=replace(GOOD.limits, max_maps=1000))),
        ("scratch", State.BROKEN, replace(GOOD, scratch=[])),
        ("scratch", State.BROKEN, replace(GOOD, scratch=[replace(DRIVE, is_memory=True)])),
        ("scratch", State.BROKEN, replace(GOOD, scratch=[replace(DRIVE, write_error="came back changed")])),
        (
            "scratch /nvme/s",
            State.WARNING,
            replace(GOOD, scratch=[replace(DRIVE, writable=False), replace(DRIVE, path=Path("/b"))]),
        ),
        (
            "scratch /nvme/s",
            State.WARNING,
            replace(GOOD, scratch=[replace(DRIVE, kind="nfs4", is_network=True)]),
        ),
        ("scratch /nvme/s", State.WARNING, replace(GOOD, scratch=[replace(DRIVE, direct_io=False)])),
        ("scratch /nvme/s", State.WARNING, replace(GOOD, scratch=[replace(DRIVE, kind="overlay")])),
        ("scratch /nvme/s", State.WARNING, replace(GOOD, scratch=[replace(DRIVE, free_bytes=1)])),
    ],
)
def test_what_is_wrong_is_told_with_a_fix(name: str, state: State, machine: Machine) -> None:
    found = rows(machine)[name]
    assert found.state is state
    assert found.fix


LONG = Finding(name="its offloader", found="word " * 40, state=State.WARNING, fix="ulimit -n 4096")


def test_a_narrow_terminal_gets_each_finding_in_whole_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _draw([LONG, Finding(name="memlock", found="no limit")])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "check its offloader",
        "  state  warning",
        f"  found  {'word ' * 40}".rstrip(),
        "  fix    ulimit -n 4096",
        "check memlock",
        "  state  fine",
        "  found  no limit",
    ]


def test_a_file_gets_a_table_that_is_no_wider_than_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    _draw([LONG, Finding(name="memlock", found="no limit")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == ["check", "state", "found", "fix"]
    assert "its offloader  warning  word word" in lines[1] and lines[1].endswith("ulimit -n 4096")
    assert " ".join(lines).count("word") == 40 and max(map(len, lines)) <= 160


def test_a_folder_without_megatron_is_refused_before_another_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert run(["doctor", "--megatron", str(folder)]) == 2
        assert f"--megatron {folder} is no Megatron: it has no megatron/core" in capsys.readouterr().err


def test_candidates_are_named_once_the_likeliest_first() -> None:
    paths = scratch_paths("/s", Path("/s/muon_offload"), ["/nvme", "/s", "/nvme"])
    assert paths == [Path("/s"), Path("/s/muon_offload"), Path("/nvme")]
    assert scratch_paths("relative", None, []) == []


def test_the_default_folder_is_among_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert _candidates()[:2] == [tmp_path, tmp_path / "muon_offload"]
