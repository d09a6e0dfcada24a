"""What a step waits for: the least time that a drive needs for a step's bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muon_offload_cli.errors import UserError, wrong
from muon_offload_cli.planner.plan import NodeTotal

GB = 10**9
"""Drives are sold and measured in powers of ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """What the drives of one node move, reading and writing at the same time.

    Attributes:
        read: Bytes a second.
        written: Bytes a second.
        source: Where the figures come from, for people.
    """

    read: float
    written: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """The time of one step's bytes on the node that has most.

    Attributes:
        floor_s: No step is shorter than this; reading and writing overlap.
        behind_s: Part of it that passes while forward and backward run.
        exposed_s: The rest, which the optimizer step takes at least.
        compute_s: Forward and backward as they were given or seen; None: not known, taken as long enough.
    """

    floor_s: float
    behind_s: float
    exposed_s: float
    compute_s: float | None


def step_cost(node: NodeTotal, bandwidth: Bandwidth, compute_s: float | None = None) -> StepCost:
    """Return the cost of one optimizer step.

    What can pass behind forward and backward is little by design: what fits the staging buffers.

    Args:
        node: Bytes of a step.
        bandwidth: Of that node.
        compute_s: Seconds of forward and backward.
    """
    # As much is written as is read.
    slower = min(bandwidth.read, bandwidth.written)
    floor = node.each_way_bytes / slower
    hidden = node.each_way_behind_bytes / slower
    if compute_s is not None:
        hidden = min(hidden, compute_s)
    return StepCost(floor_s=floor, behind_s=hidden, exposed_s=floor - hidden, compute_s=compute_s)


def parse_bandwidth(text: str) -> Bandwidth:
    """Read ``READ,WRITE`` in GB/s, as ``--bandwidth`` takes it.

    Raises:
        UserError: Not two finite numbers above 0.
    """
    words = text.split(",")
    try:
        numbers = [float(word) for word in words]
    except ValueError as error:
        raise _no_bandwidth(text) from error
    if len(numbers) != 2 or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise _no_bandwidth(text)
    return Bandwidth(read=numbers[0] * GB, written=numbers[1] * GB, source="given")


def _no_bandwidth(text: str) -> UserError:
    return wrong(
        f"--bandwidth {text} is not READ,WRITE in GB/s, each more than 0.",
        "--bandwidth 2.0,2.5, or measure it: muon-offload bench-disk DIRECTORY",
    )
