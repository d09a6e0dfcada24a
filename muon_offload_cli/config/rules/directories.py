"""The folders that the state goes to, together: equal parts, one drive each, room for all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set

from muon_offload_cli.config.rules.directory import (
    ELSEWHERE,
    KEY,
    PSEUDO_KINDS,
    as_word,
    known_of,
    one_or_several,
    uses_directory,
)
from muon_offload_cli.config.rules.facts import DirectoryFacts, MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Level, Problem, override
from muon_offload_cli.units import counted, format_bytes

SPEED_RATIO = 1.25
"""Measurements of one drive, one after another, differ by less (docs/lab-log.md)."""


def by_filesystem(devices: Iterable[int]) -> dict[int, list[int]]:
    """Return the positions of directories on each filesystem, given the number of each one's filesystem."""
    groups: dict[int, list[int]] = {}
    for position, device in enumerate(devices):
        groups.setdefault(device, []).append(position)
    return groups


def _groups(known: Sequence[DirectoryFacts]) -> Iterable[list[int]]:
    return by_filesystem(each.device for each in known).values()


@rule(name="directory-list", reason="Every directory of a list gets an equal part of the state.")
def listed(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse an empty list and a directory named twice."""
    directories = config.offload.directory
    if not uses_directory(config) or directories is None:
        return
    once = list(dict.fromkeys(map(os.path.normpath, directories)))
    if len(once) < len(directories):
        what = f"{KEY}={as_word(directories)} names a directory twice."
        yield Problem(what=what, fix=override(KEY, one_or_several(once)), keys=(KEY,))
    elif not directories:
        yield Problem(what=f"{KEY}=[] names no directory.", fix=ELSEWHERE, keys=(KEY,))


@rule(
    name="directory-drives",
    reason="Several directories are for several drives; on one drive they only make its requests smaller.",
    machine=True,
)
def drives(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of directories that share a filesystem."""
    known = known_of(config, facts)
    for group in _groups(known):
        if len(group) > 1:
            kept = [str(each.path) for n, each in enumerate(known) if n == group[0] or n not in group]
            names = as_word([str(known[position].path) for position in group])
            yield Problem(
                what=f"{KEY}={names} are on one filesystem ({known[group[0]].mount_point}): no faster than "
                "one of them.",
                fix=override(KEY, one_or_several(kept)),
                keys=(KEY,),
                level=Level.WARNING,
            )


@rule(name="directory-speed", reason="Equal parts on unequal drives wait for the slowest.", machine=True)
def speed(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Note drives of which `bench-disk` measured one as clearly slower than another."""
    measured = [(each.bytes_per_s, each) for each in known_of(config, facts) if each.bytes_per_s is not None]
    if len(measured) < 2:
        return
    (slow, slowest), (fast, fastest) = (pick(measured, key=lambda pair: pair[0]) for pick in (min, max))
    if fast > SPEED_RATIO * slow:
        yield Problem(
            what=f"{KEY}: {slowest.path} moves {format_bytes(slow)}/s and {fastest.path} "
            f"{format_bytes(fast)}/s (bench-disk); each gets an equal part, so a step goes at the pace of "
            f"{slowest.path}.",
            fix="leave the slower one out if its part takes longer than it saves the others",
            keys=(KEY,),
            level=Level.NOTE,
        )


@rule(name="directory-space", reason="A disk that is too small is told before step 1.", machine=True)
def space(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a filesystem with less room than all ranks of the node need there."""
    known, planned = known_of(config, facts), facts.planned.directory_bytes
    if len(known) != len(planned):
        return
    for group in _groups(known):
        first, needed = known[group[0]], sum(planned[position] for position in group)
        if first.kind in PSEUDO_KINDS or first.free_bytes is None or needed <= first.free_bytes:
            continue
        names = as_word([str(known[position].path) for position in group])
        others = f" (or leave {names} out)" if len(group) < len(known) else ""
        yield Problem(
            what=f"{counted(config.launcher.ranks_per_node, 'rank')} would need {format_bytes(needed)} on "
            f"{first.mount_point} ({first.kind}), which has {format_bytes(first.free_bytes)} free "
            f"({KEY}={names}).",
            fix=f"free {format_bytes(needed - first.free_bytes)}, set {KEY} to a larger mount{others}, or "
            "raise the data-parallel size",
            keys=(KEY,),
            exit_code=3,
        )
