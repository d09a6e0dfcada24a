"""Cases of config/rules/flags.py."""

from __future__ import annotations

from muon_offload_cli.config.rules import MachineFacts, MegatronFacts
from muon_offload_cli.config.rules.facts import FlagFacts
from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import ARGS, SCRIPT, Case

FULL = "recompute_granularity=full recompute_method=uniform recompute_num_layers=1"
PARSER = MachineFacts(
    megatron=MegatronFacts(
        flags={
            "recompute_granularity": FlagFacts(),
            "log_interval": FlagFacts(kind="int"),
            "sizes": FlagFacts(kind="float", nargs="+"),
            "window": FlagFacts(kind="tuple_type"),
            "kind": FlagFacts(kind="str", choices=("flash", "fused")),
            "switch": FlagFacts(nargs=0),
        }
    )
)

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
        PARSER,
        PARSER,
    ),
    Case(
        "flag-unknown",
        f"megatron.args.my_flag=1 {SCRIPT}",
        f"megatron.args.recompute-granularity=full {SCRIPT}",
        PARSER,
        PARSER,
        Level.NOTE,
    ),
    Case("flag-ours", "megatron.args.data_path=/a", f"{SCRIPT} data=script megatron.args.data_path=/a"),
    Case("flag-ours", f"{SCRIPT} data=script megatron.args.train_iters=3", SCRIPT),
    *(
        Case("flag-value", f"{ARGS}{bad}", f"{ARGS}{good}", PARSER, PARSER)
        for bad, good in (
            ("log_interval=abc", "log_interval=5"),
            ("log_interval=2.5", "log-interval='5'"),
            ("log_interval=true", "log_interval=false"),
            ("log_interval=[1,2]", "log_interval=[1]"),
            ("sizes=[1,x]", "sizes=[1,2.5]"),
            ("kind=fusd", "kind=fused"),
            ("switch=3", "switch=true"),
            ("window=[1,2]", "window=anything"),
            ("log_interval=-x", "log_interval=-1"),
        )
    ),
    *(
        Case(
            "recompute",
            " ".join(ARGS + word for word in bad.split()),
            " ".join(ARGS + w for w in good.split()),
        )
        for bad, good in (
            ("recompute_granularity=full", FULL),
            ("recompute_granularity=some", "recompute_granularity=selective"),
            ("recompute_granularity=full recompute_num_layers=2", FULL),
            ("recompute_granularity=selective recompute_method=block", FULL.replace("uniform", "block")),
            (FULL.replace("uniform", "both"), FULL),
            (FULL.replace("=1", "=0"), FULL),
            ("recompute_num_layers=many", ""),
        )
    ),
]
