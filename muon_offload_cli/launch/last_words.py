"""The end of a rank's log, as far as it says something."""

from __future__ import annotations

import itertools
import re

SHOWN_LINES = 12

# As the modules warnings (with the line of source that it quotes) and logging print them, torch's logging
# among them, and Megatron's own lines on arguments that it cannot infer.
_WARNING = re.compile(
    r"^(?:\[rank\d+\]:[ ]?)?(?:"
    r"\S.*\.py:\d+:[ ]\w*Warning:.*(?:\n(?:\[rank\d+\]:)?[ ]+\S.*)?"
    r"|WARNING:.*|W\d{4}[ ]\d\d:\d\d:\d\d\.\d+[ ].*"
    r"|Deferring[ ]to[ ]attribute[ ]metadata\..*|Original[ ]failure:.*"
    r")(?:\n|\Z)",
    re.MULTILINE,
)


def last_words(text: str, rank: int) -> list[str]:
    """Return the last lines that say something new, without the ``[rank3]:`` that torch puts before them."""
    prefix = f"[rank{rank}]:"
    lines = [line.removeprefix(prefix).expandtabs().rstrip() for line in text.splitlines()]
    lines = [line[1:] if line.startswith(" ") and not line.startswith("  ") else line for line in lines]
    # A warning that is repeated must not push out what came before it.
    return [line for line, _ in itertools.groupby(lines) if line.strip()][-SHOWN_LINES:]


def without_warnings(text: str) -> str:
    """Leave out warnings: Megatron's imports print dozens, which are no word on why a rank ended."""
    return _WARNING.sub("", text)
