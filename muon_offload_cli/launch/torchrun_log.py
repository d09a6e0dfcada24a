"""Reading torchrun's own log: which ranks ended how, and which one it saw first. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# ChildFailedError.format_msg in torch/distributed/elastic/multiprocessing/errors/__init__.py
_EXIT = re.compile(
    r"^\s*rank\s*:\s*(?P<rank>\d+)\s*\(local_rank:\s*\d+\)\s*\n"
    r"\s*exitcode\s*:\s*(?P<code>-?\d+)\s*\(pid:\s*(?P<pid>\d+)\)",
    re.MULTILINE,
)
_ROOT = "Root Cause (first observed failure):"
# From the agent itself, before it gathers the failures into the block above (api.py there).
_FIRST = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)")
# A virtual environment below the working folder is named too: ``.venv/lib/python3.12/site-packages/``.
_AGENT_LINE = re.compile(r"^(?:\[rank\d+\]:)?[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?:\S*/)?torch/distributed/")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How torchrun saw one rank end; `exit_code` is minus the signal's number if one ended it."""

    rank: int
    exit_code: int
    pid: int

    @property
    def signal_name(self) -> str:
        """``SIGKILL`` and the like, empty if no signal ended the rank."""
        return signal_name(self.exit_code)

    @property
    def ended_by_torchrun(self) -> bool:
        """Whether torchrun's own SIGTERM ended the rank because another one had died."""
        return self.exit_code == -signal.SIGTERM


def signal_name(exit_code: int) -> str:
    """Return ``SIGKILL`` and the like for minus the number of a signal; empty for another exit code."""
    if exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def rank_exits(text: str, *, first_rank: int = 0) -> list[RankExit]:
    """Return the failed ranks of this node, the one that torchrun saw first at the head.

    Args:
        text: Torchrun's log.
        first_rank: Global rank of local rank 0; torchrun's early lines name local ranks only.
    """
    before, found, after = text.rpartition(_ROOT)
    exits: list[RankExit] = []
    for part in (after, before) if found else ():
        for match in _EXIT.finditer(part):
            exits.append(_exit(int(match["rank"]), match))
    if not exits:
        exits = [_exit(first_rank + int(match["rank"]), match) for match in _FIRST.finditer(text)]
    unique: dict[int, RankExit] = {}
    for item in exits:
        unique.setdefault(item.rank, item)
    return list(unique.values())


def _exit(rank: int, match: re.Match[str]) -> RankExit:
    return RankExit(rank=rank, exit_code=int(match["code"]), pid=int(match["pid"]))


def early_output(text: str) -> str:
    """Return what ranks printed before they had a log of their own: the text above the agent's lines."""
    kept = []
    for line in text.splitlines():
        if _AGENT_LINE.match(line):
            break
        kept.append(line)
    return "\n".join(kept).strip()
