"""How much state leaves the device, in which pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.errors import Level, Problem

DEFAULT_CHUNK_MB = 512
OFFLOAD_KEYS_UNREAD_WITHOUT_ENGINE = ("offload.directory", "offload.host_memory_gb")


@rule(name="chunk-size", reason="A chunk is a number of MiB.")
def chunk_size(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse negative and infinite chunk sizes."""
    chunk_mb = config.offload.chunk_mb
    if not math.isfinite(chunk_mb) or chunk_mb < 0:
        yield Problem(
            what=f"offload.chunk_mb={chunk_mb:g} is no size: it must be more than 0.",
            fix=f"offload.chunk_mb={DEFAULT_CHUNK_MB}",
            keys=("offload.chunk_mb",),
        )


@rule(name="chunking-off", reason="Without chunks all state returns to the device at once; no peak is saved.")
def chunking_off(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of ``chunk_mb=0``."""
    if config.offload.engine is not Engine.none and config.offload.chunk_mb == 0:
        yield Problem(
            what="offload.chunk_mb=0: the whole state returns to the device at once, so its peak memory "
            "is not lowered.",
            fix=f"offload.chunk_mb={DEFAULT_CHUNK_MB}",
            keys=("offload.chunk_mb",),
            level=Level.WARNING,
        )


@rule(name="fraction-range", reason="The fraction is a part of the state's bytes.")
def fraction_range(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse fractions outside 0 to 1."""
    if not 0 <= config.offload.fraction <= 1:
        yield Problem(
            what=f"offload.fraction={config.offload.fraction:g} is outside 0 to 1.",
            fix="offload.fraction=1.0",
            keys=("offload.fraction",),
        )


@rule(name="fraction-zero", reason="An engine that moves nothing is a run that quietly stays in memory.")
def fraction_zero(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse ``fraction=0`` with an engine."""
    if config.offload.engine is not Engine.none and config.offload.fraction == 0:
        yield Problem(
            what=f"offload.fraction=0 with offload.engine={config.offload.engine.name}: "
            "nothing would be offloaded.",
            fix="offload.fraction=1.0",
            keys=("offload.fraction", "offload.engine"),
        )


@rule(name="windows", reason="One window on the device leaves no place to read ahead.")
def windows(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of a single window."""
    if config.offload.engine is not Engine.none and config.offload.windows == 1:
        yield Problem(
            what="offload.windows=1: no chunk can be read while another is stepped.",
            fix="offload.windows=3",
            keys=("offload.windows",),
            level=Level.WARNING,
        )


@rule(name="host-memory", reason="The host-memory budget is a number of GiB, or auto.")
def host_memory(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a budget that is neither."""
    text = config.offload.host_memory_gb
    if text == "auto":
        return
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        yield Problem(
            what=f"offload.host_memory_gb={text} is neither a number of GiB nor auto.",
            fix="offload.host_memory_gb=auto",
            keys=("offload.host_memory_gb",),
        )


@rule(
    name="unused-offload-keys",
    reason="A setting that the chosen path never reads would be dropped in silence.",
)
def unused_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of a directory or a budget given to a run that offloads nothing."""
    if config.offload.engine is not Engine.none:
        return
    for key in OFFLOAD_KEYS_UNREAD_WITHOUT_ENGINE:
        if key in written:
            yield Problem(
                what=f"{key} is written, and offload.engine=none never reads it.",
                fix="offload.engine=disk",
                keys=(key, "offload.engine"),
                level=Level.WARNING,
            )
