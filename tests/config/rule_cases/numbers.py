"""Cases of config/rules/numbers.py."""

from __future__ import annotations

from muon_offload_cli.config.rules.directory import FOLDERS
from tests.config.rule_cases.case import Case

CASES = [
    Case("number-range", "train.steps=0"),
    Case("number-range", "optimizer.lr=nan"),
    Case("number-range", "optimizer.lr=inf"),
    Case("number-range", "optimizer.muon_momentum=1"),
    Case("number-range", "optimizer.muon_num_ns_steps=0"),
    Case("number-range", "launcher.master_port=0"),
    Case("number-range", "model.hidden_size=99999999999"),
    *(Case("empty-path", f"{key}=") for key in (*FOLDERS, "megatron.path", "megatron.entrypoint")),
    Case("node-rank", "launcher.nodes=2 launcher.node_rank=2", "launcher.nodes=2 launcher.node_rank=1"),
    Case(
        "meeting-point",
        "launcher.nodes=2 launcher.master_address=a",
        "launcher.nodes=2 launcher.master_address=a launcher.master_port=1234",
    ),
    Case("number-range", "offload.windows=0"),
    Case("number-range", "offload.io_threads=0"),
    Case("number-range", "offload.staging_mb=-1"),
    Case("number-range", "offload.staging_mb=nan"),
    Case("number-range", "optimizer.lr=-1"),
    Case("number-range", "optimizer.clip_grad=-inf"),
    Case("number-range", "optimizer.clip_grad=nan"),
    Case("number-range", "optimizer.weight_decay=inf"),
    Case("number-range", f"model.num_layers={'9' * 400}"),
]
