"""By how much this process's memory grew at its highest, between two moments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self")


@dataclass(slots=True)
class Growth:
    """Bytes of resident memory at the highest beyond what they were at the beginning, once it is over."""

    nbytes: int = 0


@contextlib.contextmanager
def resident_growth() -> Iterator[Growth]:
    """Measure the peak of resident memory (anonymous, mapped files, shared) in a context; exact, not sampled.

    Where the kernel does not let the peak be set back (clear_refs in proc(5)), an earlier, higher one counts.
    """
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")
    before, growth = _status("VmRSS"), Growth()
    try:
        yield growth
    finally:
        growth.nbytes = max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", (_PROCESS / "status").read_text(), flags=re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
