"""Which plans peers may have side by side; the comparison over real ranks is in tests/end_to_end."""

from __future__ import annotations

from typing import Any

from muon_offload_cli.megatron.plan_agreement import fingerprint
from muon_offload_cli.offload.plan import ParameterSpec, plan_chunks

DENSE = [ParameterSpec(shape=(64, size), domain=False) for size in (32, 64, 16, 64)]
EXPERTS = [ParameterSpec(shape=(8, 16), domain=True)] * 3
SETTINGS: dict[str, Any] = {
    "chunk_bytes": 60_000,
    "fraction": 1.0,
    "host_bytes": 0,
    "disk": True,
    "windows": 3,
}


def hashed(parameters: list[ParameterSpec], *, domain: bool = False, **changes: Any) -> tuple[int, int, int]:
    return fingerprint(plan_chunks(parameters, **SETTINGS | changes), parameters, domain)


def test_peers_may_own_other_experts_and_keep_other_chunks_in_memory() -> None:
    alone = hashed(DENSE)
    assert alone[1:] == (2, 4)
    assert hashed([*DENSE, *EXPERTS]) == alone
    assert hashed(DENSE, host_bytes=80_000) == alone


def test_other_cuts_orders_shapes_and_device_parts_differ() -> None:
    turned = [ParameterSpec(shape=p.shape[::-1], domain=p.domain) for p in DENSE]
    others = [
        hashed(DENSE, chunk_bytes=20_000),
        hashed(DENSE[::-1]),
        hashed(turned),
        hashed(DENSE, fraction=0.6),
        hashed(DENSE[1:]),
    ]
    assert len({hashed(DENSE), *others}) == 6


def test_experts_are_compared_by_themselves() -> None:
    assert hashed([*DENSE, *EXPERTS], domain=True) == hashed(EXPERTS, domain=True)
    assert hashed([*DENSE, *EXPERTS], domain=True) != hashed([*DENSE, *EXPERTS])
