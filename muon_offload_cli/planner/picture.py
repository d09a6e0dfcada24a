"""A picture of a plan as text: an SVG, or an HTML page around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from muon_offload_cli.planner.plan import RankKind, RunPlan
from muon_offload_cli.planner.rank import RankFigures
from muon_offload_cli.units import format_bytes

_LABEL_WIDTH, _BAR_WIDTH, _BAR_HEIGHT, _GAP, _MARGIN = 190, 560, 20, 6, 20
_COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar: a tier of a kind of rank, made of named parts in bytes."""

    label: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)


def bars_of(figures: RankFigures) -> list[Bar]:
    """Return the three tiers of a rank as bars."""
    return [
        Bar(label="disk", parts=(("Muon's state", figures.disk_bytes),)),
        Bar(
            label="host",
            parts=(("Muon's state", figures.host_bytes), ("staging", figures.staging_bytes)),
        ),
        Bar(
            label="device",
            parts=(
                ("Muon's state", figures.gpu_bytes),
                ("windows", figures.window_bytes),
                ("weights", figures.weight_bytes),
                ("gradients", figures.gradient_bytes),
                ("Adam's state", figures.adam_state_bytes),
            ),
        ),
    ]


def name_ranks(kind: RankKind, pipeline: bool) -> str:
    """Write which ranks are meant: ``ranks 0-3``, ``ranks 0, 2, 4 and 5 more, stage 1``."""
    ranks = kind.ranks
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        text = f"{ranks[0]}-{ranks[-1]}"
    else:
        text = ", ".join(map(str, ranks[:3])) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
    name = f"rank{'s' * (len(ranks) > 1)} {text}"
    return f"{name}, stage {kind.stage}" if pipeline else name


def svg(plan: RunPlan, title: str, *, most: int = 8) -> str:
    """Draw the kinds of rank with most on disk.

    Args:
        plan: What to draw.
        title: Line above it.
        most: Kinds that are drawn; a last line counts the others.
    """
    kinds = plan.kinds[:most]
    pipeline = len({kind.stage for kind in plan.kinds}) > 1
    bars = [(kind, bars_of(kind.figures)) for kind in kinds]
    longest = max((bar.total for _, own in bars for bar in own), default=0) or 1
    rows: list[str] = []
    y = _MARGIN + 24
    colours = _colours([bar for _, own in bars for bar in own])
    for kind, own in bars:
        rows.append(_text(_MARGIN, y + 14, name_ranks(kind, pipeline), bold=True))
        y += _BAR_HEIGHT + _GAP
        for bar in own:
            rows += _bar(bar, y, longest, colours)
            y += _BAR_HEIGHT + _GAP
        y += _GAP
    if len(plan.kinds) > most:
        rows.append(_text(_MARGIN, y + 14, f"and {len(plan.kinds) - most} more kinds of rank"))
        y += _BAR_HEIGHT
    rows += _legend(colours, y + _GAP)
    width, height = _LABEL_WIDTH + _BAR_WIDTH + 140 + 2 * _MARGIN, y + 50
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    )
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, background, _text(_MARGIN, _MARGIN, title, bold=True), *rows, "</svg>"]) + "\n"


def html(plan: RunPlan, title: str, lines: Sequence[tuple[str, str]]) -> str:
    """Return a page with the picture and the figures below it.

    Args:
        plan: What to draw.
        title: Title of the page.
        lines: Label and text of each figure.
    """
    rows = "\n".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in lines)
    style = "body{font-family:sans-serif;margin:2em}th{text-align:left;padding-right:2em;vertical-align:top}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{style}</style></head><body>\n{svg(plan, title)}<table>\n{rows}\n</table></body></html>\n"
    )


def _colours(bars: Sequence[Bar]) -> dict[str, str]:
    names = dict.fromkeys(name for bar in bars for name, size in bar.parts if size)
    return dict(zip(names, _COLOURS, strict=False))


def _bar(bar: Bar, y: int, longest: int, colours: dict[str, str]) -> list[str]:
    rows = [_text(_MARGIN + 20, y + 14, bar.label)]
    x = float(_LABEL_WIDTH)
    for name, size in bar.parts:
        if size:
            width = size / longest * _BAR_WIDTH
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{_BAR_HEIGHT}" '
                f'fill="{colours[name]}"><title>{escape(name)}: {format_bytes(size)}</title></rect>'
            )
            x += width
    rows.append(_text(int(x) + 6, y + 14, format_bytes(bar.total) if bar.total else "-"))
    return rows


def _legend(colours: dict[str, str], y: int) -> list[str]:
    rows, x = [], _MARGIN
    for name, colour in colours.items():
        rows.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        rows.append(_text(x + 18, y + 11, name))
        x += 34 + 8 * len(name)
    return rows


def _text(x: int, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}"{weight}>{escape(text)}</text>'
