"""Cases of config/rules/chunks.py."""

from __future__ import annotations

from dataclasses import replace

from muon_offload_cli.config.rules import MachineFacts, ParameterFacts, PlannedFacts
from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import Case

TWO_HUNDRED_GB_OF_HOST = MachineFacts(planned=PlannedFacts(host_bytes=200 * 2**30))
LARGE_RINGS = MachineFacts(
    planned=PlannedFacts(host_bytes=200 * 2**30, staging_bytes=200 * 2**30), headroom_bytes=10**11
)
TEN_GB_ON_DEVICES = MachineFacts(
    planned=PlannedFacts(host_bytes=2**20, device_bytes=10 * 2**30), headroom_bytes=5 * 2**30
)
ONE_GB_OF_HOST = MachineFacts(planned=PlannedFacts(host_bytes=2**30))
LARGE_PARAMETER = MachineFacts(
    planned=PlannedFacts(largest_parameter=ParameterFacts(name="w", shape=(512, 512), state_bytes=2 * 2**20))
)

CASES = [
    Case("chunk-size", "offload.chunk_mb=-1"),
    Case("chunk-size", "offload.chunk_mb=inf"),
    Case("chunking-off", "offload.chunk_mb=0", "offload.chunk_mb=0 offload=none", level=Level.WARNING),
    Case("fraction-range", "offload.fraction=1.5", "offload.fraction=0.5"),
    Case("fraction-range", "offload.fraction=nan"),
    Case("fraction-zero", "offload.fraction=0", "offload.fraction=0 offload=none"),
    Case("windows", "offload.windows=1", level=Level.WARNING),
    Case("host-memory", "offload.host_memory_gb=lots", "offload.host_memory_gb=auto"),
    Case("host-memory", "offload.host_memory_gb=-1", "offload.host_memory_gb=1.5"),
    Case(
        "chunk-parameter",
        "offload.chunk_mb=1.5",
        "offload=none",
        LARGE_PARAMETER,
        LARGE_PARAMETER,
        level=Level.WARNING,
    ),
    Case(
        "chunk-parameter",
        "offload.chunk_mb=1.5",
        "offload.chunk_mb=3",
        LARGE_PARAMETER,
        LARGE_PARAMETER,
        level=Level.WARNING,
    ),
    Case(
        "host-fits",
        "offload=host cluster=h200_x1",
        "offload=host cluster=gb300_x4",
        TWO_HUNDRED_GB_OF_HOST,
        ONE_GB_OF_HOST,
    ),
    Case(
        "host-fits",
        "offload.host_memory_gb=200 cluster=h200_x1",
        "offload.host_memory_gb=200",
        TWO_HUNDRED_GB_OF_HOST,
        ONE_GB_OF_HOST,
    ),
    Case(
        "host-headroom",
        "offload=host",
        "offload=host",
        replace(TWO_HUNDRED_GB_OF_HOST, headroom_bytes=100 * 10**9),
        replace(ONE_GB_OF_HOST, headroom_bytes=100 * 10**9),
    ),
    Case(
        "host-headroom",
        "offload.host_memory_gb=200",
        "offload.host_memory_gb=200",
        replace(TWO_HUNDRED_GB_OF_HOST, headroom_bytes=16 * 10**9, memory_limit_bytes=16 * 2**30),
        replace(ONE_GB_OF_HOST, headroom_bytes=16 * 10**9, memory_limit_bytes=16 * 2**30),
    ),
    Case("host-headroom", "offload.staging_mb=300000", "", LARGE_RINGS, ONE_GB_OF_HOST),
    Case("host-fits", "offload.staging_mb=300000 cluster=h200_x1", "", LARGE_RINGS, ONE_GB_OF_HOST),
    Case("host-headroom", "device=cpu", "device=cuda", TEN_GB_ON_DEVICES, TEN_GB_ON_DEVICES),
    Case("host-headroom", "device=cpu offload=host", "device=cuda", TEN_GB_ON_DEVICES, TEN_GB_ON_DEVICES),
    Case("staging", "offload.staging_mb=0.5", "offload.staging_mb=1"),
    Case("staging", "offload.chunk_mb=64 offload.staging_mb=15", "offload.chunk_mb=64 offload.staging_mb=16"),
    Case("staging", "offload.staging_mb=0.5", "offload.staging_mb=0.5 offload=mapped"),
    Case("chunk-size", "offload.chunk_mb=1e300"),
    Case("host-memory", "offload.host_memory_gb=nan", "offload.host_memory_gb=0"),
    Case("host-memory", "offload.host_memory_gb=1e300", "offload.host_memory_gb=64"),
]
