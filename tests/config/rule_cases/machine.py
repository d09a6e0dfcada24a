"""Cases of config/rules/machine.py."""

from __future__ import annotations

from dataclasses import replace

from muon_offload_cli.config.rules import MachineFacts, MegatronFacts
from muon_offload_cli.errors import Problem
from tests.config.rule_cases.case import NATIVE, Case
from tests.config.rule_cases.chunks import TEN_GB_ON_DEVICES

CHANGED = MachineFacts(
    megatron=MegatronFacts(
        version="0.20", root="/checkout", chunked_offloader=True, offloader_lacks=("Offloader.step()",)
    )
)
TWO_GPUS = MachineFacts(cuda_available=True, num_gpus=2)

CASES = [
    Case("native-contract", "offload=mapped", "offload=disk", CHANGED, CHANGED),
    Case("native-contract", "offload=mapped", "offload=mapped", CHANGED, NATIVE),
    Case(
        "native-offloader",
        "offload=none megatron.args.chunked_optimizer_state_offload=true",
        "offload=none megatron.args.chunked_optimizer_state_offload=true",
        MachineFacts(megatron=MegatronFacts(version="0.19.2")),
        MachineFacts(megatron=MegatronFacts(version="0.20", chunked_offloader=True)),
    ),
    Case("found", "", bad_facts=MachineFacts(problems=(Problem(what="megatron-core is missing."),))),
    Case(
        "muon-installed",
        "",
        "optimizer=adam",
        MachineFacts(muon_problems=(Problem(what="emerging-optimizers is a stub."),)),
        MachineFacts(muon_problems=(Problem(what="emerging-optimizers is a stub."),)),
    ),
    Case(
        "megatron-path",
        "megatron.path=/x",
        bad_facts=MachineFacts(megatron_missing=("megatron/core", "megatron/training")),
    ),
    Case(
        "cuda",
        "device=cuda",
        "device=auto",
        MachineFacts(cuda_available=False),
        MachineFacts(cuda_available=False),
    ),
    Case(
        "cuda",
        "device=cuda",
        "device=cpu",
        replace(TEN_GB_ON_DEVICES, cuda_available=False),
        TEN_GB_ON_DEVICES,
    ),
    Case(
        "gpus-here",
        "",
        "launcher.ranks_per_node=2",
        TWO_GPUS,
        TWO_GPUS,
    ),
    Case(
        "gpus-here",
        "",
        "device=cpu",
        replace(
            TWO_GPUS,
            layouts_told="What fits here: ...",
            layouts_fix="launcher.ranks_per_node=2 parallel.ep=1",
        ),
        TWO_GPUS,
    ),
    Case("gpus-here", "", "device=cpu", replace(TWO_GPUS, layouts_told="Nothing fits."), TWO_GPUS),
]
