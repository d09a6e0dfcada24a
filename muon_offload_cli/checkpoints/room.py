"""How many checkpoints a run puts beside those that stand. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Coming:
    """What a run saves, and what stands already.

    Attributes:
        saves: Checkpoints that it writes until its last step.
        standing: Checkpoints that it goes on from and may delete.
        freed: Bytes that an interrupted save left, which the next one removes before it writes.
    """

    saves: int = 1
    standing: int = 0
    freed: int = 0

    @classmethod
    def of(cls, *, steps: int, interval: int, begin: int = 0, standing: int = 0, freed: int = 0) -> Coming:
        """Count the saves after step `begin`: one every `interval`, and the last step; 0: that alone."""
        saves = 1 if interval < 1 else math.ceil(steps / interval) - begin // interval
        return cls(saves=max(1, saves), standing=standing, freed=freed)

    def more(self, keep: int | None) -> int:
        """Return how many more stand at once; with `checkpoint.keep` older ones go when one is whole."""
        return self.saves if keep is None else min(self.saves, max(1, keep + 1 - self.standing))

    def keep_within(self, room: int) -> int | None:
        """Return the largest `checkpoint.keep` under which `room` more are enough; None: there is none."""
        keep = room + self.standing - 1
        return keep if room >= 1 and keep >= 1 else None
