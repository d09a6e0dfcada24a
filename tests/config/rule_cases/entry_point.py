"""Cases of config/rules/entry_point.py."""

from __future__ import annotations

from muon_offload_cli.config.rules import FileFacts, MachineFacts
from tests.config.rule_cases.case import SCRIPT, UNREADABLE, Case

CASES = [
    *(
        Case(
            "entrypoint-file",
            SCRIPT,
            SCRIPT,
            MachineFacts(files={"/my/pretrain.py": bad}),
            MachineFacts(files={"/my/pretrain.py": FileFacts(num_bytes=5)}),
        )
        for bad in UNREADABLE
    ),
    Case(
        "entrypoint-source",
        SCRIPT,
        SCRIPT,
        MachineFacts(
            files={"/my/pretrain.py": FileFacts(num_bytes=5, not_python="is not Python: line 1: x")}
        ),
        MachineFacts(files={"/my/pretrain.py": FileFacts(num_bytes=5)}),
    ),
    Case(
        "entrypoint-checkout",
        SCRIPT,
        f"{SCRIPT} megatron.path=/my",
        MachineFacts(megatron_beside_script="/my"),
        MachineFacts(megatron_beside_script="/my"),
    ),
    Case(
        "entrypoint-checkout",
        f"{SCRIPT} megatron.path=/your",
        SCRIPT,
        MachineFacts(megatron_beside_script="/my"),
    ),
    Case("script-words", "megatron.script_args=[--a]", f"{SCRIPT} megatron.script_args=[--a,3]"),
    Case(
        "script-words",
        f"{SCRIPT} megatron.script_args=[--num-layers,3]",
        f"{SCRIPT} megatron.script_args=[lr]",
    ),
    Case("script-words", f"{SCRIPT} 'megatron.script_args=[\"--train_iters=9\"]'"),
    Case("data-script", "data=script", f"data=script {SCRIPT}"),
]
