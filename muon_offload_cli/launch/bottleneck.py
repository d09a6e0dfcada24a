"""What bounded the steps of a run, and the setting to change next."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.launch.figures import RankFigures, SteadySums
from muon_offload_cli.units import format_bytes

NOTICED = 0.05
"""Part of a step that it may stand still before anybody wants to hear of it."""


class Bound(enum.StrEnum):
    """What a step waits for most."""

    COMPUTE = "compute"
    DRIVES = "drives"
    COPIES = "copies"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """What bounded the slowest rank's steps, the first one left out.

    Attributes:
        bound: What it was.
        step_s: Mean seconds of a step.
        wait_s: Mean seconds in which the device stood still for state.
        hidden: Part of the disk's busy time in which the device computed, 0 to 1; None without I/O.
        text: The finding in one line.
        advice: The setting to change next; empty if there is none.
    """

    bound: Bound
    step_s: float
    wait_s: float
    hidden: float | None
    text: str
    advice: str


def find_bottleneck(config: Config, ranks: Iterable[RankFigures]) -> Bottleneck | None:
    """Judge a run by its slowest rank; None where nothing was offloaded or no step came after the first."""
    slowest = max((rank.steady for rank in ranks), key=lambda steady: steady.seconds, default=SteadySums())
    if config.offload.engine is Engine.none or not slowest.steps:
        return None
    bound = _bound(slowest)
    hidden = 1 - slowest.io_wait_s / slowest.io_busy_s if slowest.io_busy_s else None
    step_s, wait_s = slowest.seconds / slowest.steps, slowest.wait_s / slowest.steps
    waits = f"a step took {step_s:.3g} s and stood still for state in {wait_s:.2g} s of it"
    moved = ""
    if hidden is not None:
        moved = (
            f"; {format_bytes(slowest.bytes_moved / slowest.steps)} a step and rank moved at "
            f"{format_bytes(slowest.bytes_moved / slowest.io_busy_s)}/s, {hidden:.0%} of that time hidden"
        )
    return Bottleneck(
        bound=bound,
        step_s=step_s,
        wait_s=wait_s,
        hidden=hidden,
        text=f"bound by {bound.value}: {waits}{moved}",
        advice=_advice(config, bound),
    )


def _bound(steady: SteadySums) -> Bound:
    if steady.wait_s <= NOTICED * steady.seconds:
        return Bound.COMPUTE
    return Bound.DRIVES if steady.io_wait_s >= steady.wait_s / 2 else Bound.COPIES


def _advice(config: Config, bound: Bound) -> str:
    match bound:
        case Bound.COMPUTE:
            return ""
        case Bound.COPIES:
            return f"offload.windows={config.offload.windows + 2}"
        case Bound.DRIVES:
            if config.offload.engine is Engine.mapped:
                return "offload.engine=disk"
            if not config.offload.host_memory_gib:
                return "offload.host_memory_gb=auto"
            return f"train.global_batch={2 * config.train.global_batch}, or offload.directory on more drives"
