"""Tables that keep every word: drawn where they fit, and stacked, a line a cell, where they do not."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

FOLDED_CELLS = 40
"""A column of text may be folded to this width, and no narrower."""
GAP = 2


def print_table(
    console: Console, titles: Sequence[str], rows: Sequence[Sequence[str | Text]], *, numbers: int = 0
) -> None:
    """Print rows under their titles.

    Args:
        console: Where to; its width decides.
        titles: Of the columns; the first one's cell names a row.
        rows: Cells; a stacked row leaves out those that are empty or ``-``.
        numbers: Columns on the left that are drawn to the right, as figures are.
    """
    cells = [[each if isinstance(each, Text) else Text(each) for each in row] for row in rows]
    table = Table(show_edge=False, pad_edge=False, box=None)
    for place, title in enumerate(titles):
        if place < numbers:
            table.add_column(title, justify="right", no_wrap=True)
        else:
            table.add_column(title, overflow="fold")
    for row in cells:
        table.add_row(*row)
    widths = [max(cell.cell_len for cell in column) for column in zip(map(Text, titles), *cells, strict=True)]
    least = [width if place < numbers else min(width, FOLDED_CELLS) for place, width in enumerate(widths)]
    if sum(least) + GAP * (len(least) - 1) <= console.width:
        console.print(table)
        return
    label = max(map(len, titles))
    for row in cells:
        console.print(Text.assemble((f"{titles[0]} ", "bold"), row[0]))
        for title, cell in zip(titles[1:], row[1:], strict=True):
            if cell.plain not in ("", "-"):
                console.print(Text.assemble((f"  {title:<{label}}  ", "bold"), cell))
