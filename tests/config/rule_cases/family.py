"""Cases of config/rules/family.py."""

from __future__ import annotations

from muon_offload_cli.config.rules import MachineFacts, MegatronFacts
from tests.config.rule_cases.case import Case

ONLY_QUINTIC_5 = MachineFacts(megatron=MegatronFacts(newton_schulz={"quintic": frozenset({5, 10})}))
NS_WITHOUT_QUINTIC = MachineFacts(
    megatron=MegatronFacts(newton_schulz={"quintic": frozenset(), "cans": frozenset({5})})
)

CASES = [
    Case("optimizer-family", "optimizer.name=soap"),
    Case(
        "adaptive-muon",
        "optimizer.name=adaptive_muon optimizer.layer_wise=true",
        "optimizer.name=adaptive_muon optimizer.layer_wise=true",
        MachineFacts(megatron=MegatronFacts(version="0.19.2", adaptive_muon="no attribute 'scale_mode'")),
        MachineFacts(megatron=MegatronFacts(version="0.19.2", adaptive_muon="")),
    ),
    Case(
        "plain-muon", "optimizer.name=adaptive_muon", "optimizer.name=adaptive_muon optimizer.layer_wise=true"
    ),
    Case("optimizer-family", "optimizer.name=adm", "optimizer=adam"),
    Case("plain-muon", "optimizer.name=muon", "optimizer.name=muon optimizer.layer_wise=true"),
    Case("plain-muon", "optimizer.name=muon optimizer.distributed=true", "optimizer=muon"),
    Case("muon-distributed", "optimizer.distributed=true"),
    Case("adam-distributed", "optimizer.name=adam", "optimizer=adam"),
    Case("adam-layer-wise", "optimizer=adam optimizer.layer_wise=true", "optimizer=adam"),
    Case("adam-offload", "optimizer=adam", "optimizer=adam offload=none"),
    Case("muon-choices", "optimizer.muon_coefficient_type=quartic", "optimizer.muon_coefficient_type=cans"),
    Case("muon-choices", "optimizer.lr_decay_style=cosinus"),
    Case("newton-schulz", "", "", NS_WITHOUT_QUINTIC, ONLY_QUINTIC_5),
    Case("newton-schulz", "optimizer.muon_num_ns_steps=4", "", ONLY_QUINTIC_5, ONLY_QUINTIC_5),
    Case(
        "newton-schulz",
        "optimizer.muon_num_ns_steps=6",
        "optimizer=adam optimizer.muon_num_ns_steps=6",
        ONLY_QUINTIC_5,
        ONLY_QUINTIC_5,
    ),
    Case("learning-rate", "optimizer.min_lr=0.1", "optimizer.min_lr=0.001"),
    Case("learning-rate", "optimizer.lr_warmup_steps=30", "optimizer.lr_warmup_steps=29"),
]
