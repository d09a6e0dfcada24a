"""Training with offloaded state is training: the same losses, gradient norms and state, to the last bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.planned import assert_as_planned
from tests.end_to_end.runs import DP2, TP2_EP2, Run, train
from tests.end_to_end.saving import Saved

MEGATRON_018 = os.environ.get("MUON_OFFLOAD_MEGATRON_018", "")
RESIDENT = ("offload=none",)
PATHS = {
    "tp2_ep2": TP2_EP2,
    "dp2": DP2,
    "uneven_pp2": (
        "launcher=two_ranks",
        "parallel=data",
        "parallel.pp=2",
        "model.num_layers=3",
        "parallel.decoder_first_pipeline_num_layers=1",
    ),
    "older_path": (*DP2, "megatron.param_layout=false"),
    # Gradients in bf16, clipped: norms are about 0.8 here.
    "bf16_gradients": (
        "launcher=two_ranks",
        "parallel=tp2_ep2",
        "parallel.etp=1",
        "megatron.args.grad_reduce_in_bf16=true",
        "optimizer.clip_grad=0.3",
    ),
    "megatron_018": DP2,
}
THREE_TIERS = ("offload.fraction=0.8", "offload.host_memory_gb=0.0003")


def more(layout: str) -> dict[str, str]:
    return {"first_on_path": MEGATRON_018} if layout == "megatron_018" else {}


@pytest.fixture(scope="module")
def resident(straight: Saved, tmp_path_factory: pytest.TempPathFactory) -> Residents:
    return Residents(tmp_path_factory.mktemp("resident"), tp2_ep2=straight.run)


class Residents:
    """Runs with resident state, one a layout, made when they are first compared with."""

    def __init__(self, root: Path, **runs: Run) -> None:
        self._root = root
        self._runs = runs

    def of(self, layout: str) -> Run:
        if layout not in self._runs:
            run = train(self._root / layout, *PATHS[layout], *RESIDENT, **more(layout))
            assert run.exit_code == 0, run.output
            self._runs[layout] = run
        return self._runs[layout]


def assert_same(resident: Run, offloaded: Run, engine: str) -> None:
    assert offloaded.exit_code == 0, offloaded.output
    reports = offloaded.reports
    assert list(reports) == list(resident.reports)
    for rank, report in reports.items():
        wanted = resident.reports[rank]
        assert (report.engine, report.steps_from_backend, report.steps) == (engine, 6, 6)
        assert wanted.engine == "none"
        assert offloaded.curve(rank) == resident.curve(rank)
        assert len(offloaded.curve(rank)) == 6
        assert report.chunks >= 5
        assert set(wanted.digests) == {"weights", "masters", "momenta"}
        assert report.digests == wanted.digests
        assert report.adam_state_bytes == wanted.adam_state_bytes > 0
        assert report.muon_parameters == wanted.muon_parameters > 0
    losses = [loss for _, loss, _ in offloaded.curve(max(reports))]
    # A run whose weights never move would be identical too.
    assert None not in losses
    assert len(set(losses)) == 6


@pytest.mark.parametrize("layout", ["dp2", "tp2_ep2"])
@pytest.mark.parametrize("engine", ["host", "mapped", "disk"])
def test_six_steps_are_bit_identical_to_resident_state(
    tmp_path: Path, directory: Path, resident: Residents, engine: str, layout: str
) -> None:
    words = [f"offload={engine}", *([f"offload.directory={directory}"] if engine != "host" else [])]
    run = train(tmp_path / "run", *PATHS[layout], *words)
    assert_same(resident.of(layout), run, engine)
    assert_as_planned(run, *PATHS[layout], *words)
    for report in run.reports.values():
        held = report.host_bytes if engine == "host" else report.disk_bytes
        assert held >= report.muon_state_bytes
        assert report.gpu_bytes == 0


@pytest.mark.parametrize(
    ("layout", "number", "tiers"),
    [
        ("uneven_pp2", 2, ()),
        ("older_path", 3, THREE_TIERS),
        ("bf16_gradients", 1, ()),
        ("megatron_018", 1, ()),
    ],
)
def test_other_ways_through_megatron_are_bit_identical(
    tmp_path: Path, directory: Path, resident: Residents, layout: str, number: int, tiers: tuple[str, ...]
) -> None:
    if layout == "megatron_018" and not MEGATRON_018:
        pytest.skip("MUON_OFFLOAD_MEGATRON_018 names no unpacked megatron-core 0.18.2")
    places = [f"{directory}{suffix}" for suffix in ("", "-b", "-c")[:number]]
    words = (*PATHS[layout], "offload=disk", f"offload.directory=[{','.join(places)}]", *tiers)
    run = train(tmp_path / "run", *words, **more(layout))
    assert_same(resident.of(layout), run, "disk")
    if layout != "megatron_018":
        # The plan is made for the Megatron that is installed.
        assert_as_planned(run, *words)
    reports = list(run.reports.values())
    for report in reports if tiers else ():
        assert min(report.disk_bytes, report.host_bytes, report.gpu_bytes) > 0
        assert report.host_bytes <= 0.0003 * 2**30 / 2
    # Two ranks have a directory each where there are two, and all of them where there are more.
    each = places * 2 if number <= 2 else [", ".join(places)] * 2
    assert [report.directory for report in reports] == each[:2]
    assert [row["directory"] for row in run.summary["ranks"]] == each[:2]
    assert (f"each rank's file is striped over all {number} directories" in run.output) is (number > 2)
    assert not any(Path(place).exists() for place in places)
    version = "0.18.2" if layout == "megatron_018" else "0.19.2"
    assert {report.megatron_version for report in reports} == {version}
