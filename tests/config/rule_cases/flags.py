"""Cases of config/rules/flags.py."""

from __future__ import annotations

from muon_offload_cli.config.rules import MachineFacts, MegatronFacts
from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import SCRIPT, Case

CASES = [
    Case("flag-form", "'megatron.args.a={b: 1}'", "megatron.args.a=[1,2]"),
    Case("flag-form", "megatron.args.a.b=1"),
    Case(
        "flag-ours", "megatron.args.tensor-model-parallel-size=2", "megatron.args.recompute_granularity=full"
    ),
    Case("flag-ours", "megatron.args.lr=1"),
    Case(
        "flag-unknown",
        "megatron.args.recompute_granulity=full",
        "megatron.args.recompute-granularity=full",
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
    ),
    Case(
        "flag-unknown",
        f"megatron.args.my_flag=1 {SCRIPT}",
        f"megatron.args.recompute-granularity=full {SCRIPT}",
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
        Level.NOTE,
    ),
    Case("flag-ours", "megatron.args.data_path=/a", f"{SCRIPT} data=script megatron.args.data_path=/a"),
    Case("flag-ours", f"{SCRIPT} data=script megatron.args.train_iters=3", SCRIPT),
]
