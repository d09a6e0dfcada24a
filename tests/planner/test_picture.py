"""Pictures of plans."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from muon_offload_cli.planner.picture import html, name_ranks, svg
from muon_offload_cli.planner.plan import RankKind
from tests.planner.plans import planner

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_is_well_formed_and_bars_are_on_one_scale() -> None:
    plan = planner("tiny").plan()
    root = ElementTree.fromstring(svg(plan, "a <title> & more"))
    bars = {
        (bar.findtext(f"{SVG}title") or "").partition(":")[0]: float(bar.get("width", "0"))
        for bar in root.iter(f"{SVG}rect")
        if bar.find(f"{SVG}title") is not None
    }
    own = plan.heaviest.figures
    assert bars["staging"] / bars["weights"] == pytest.approx(own.staging_bytes / own.weight_bytes, rel=0.01)


def test_a_page_holds_the_picture_and_escaped_figures() -> None:
    page = html(planner("tiny").plan(), "plan", [("directory", "/a&b <c>")])
    assert "<svg" in page
    assert "/a&amp;b &lt;c&gt;" in page


def test_kinds_beyond_the_first_are_counted() -> None:
    plan = planner("kimi_k2").plan()
    assert f"and {len(plan.kinds) - 8} more kinds of rank" in svg(plan, "")


def test_ranks_are_named_briefly() -> None:
    figures = planner("tiny").plan().heaviest.figures

    def name(*ranks: int, pipeline: bool = False) -> str:
        return name_ranks(RankKind(ranks=ranks, stage=1, figures=figures), pipeline)

    assert name(3) == "rank 3"
    assert name(0, 1, 2, 3) == "ranks 0-3"
    assert name(0, 2, 4, 6, 8) == "ranks 0, 2, 4 and 2 more"
    assert name(0, 1, pipeline=True) == "ranks 0-1, stage 1"
