"""Cases of config/rules/data.py."""

from __future__ import annotations

from muon_offload_cli.config.rules import FileFacts, MachineFacts
from muon_offload_cli.errors import Level, Problem
from tests.config.rule_cases.case import ARGS, SCRIPT, UNREADABLE, Case

CASES = [
    Case("data-named", "data=text", "data=text data.paths=[/a]"),
    Case("data-named", "data=chat", "data=chat data.paths=[/a]"),
    Case("data-named", "data=indexed", "data=indexed data.prefix=/a"),
    Case("cache-absolute", "data.cache_directory=c", "'data.cache_directory=\"~/c\"'"),
    *(
        Case("data-flags", f"{ARGS}{flag}=true", f"{ARGS}{flag}=false")
        for flag in (
            "sft",
            "fim-data",
            "hybrid_context_parallel",
            "dataloader_inter_document_masking",
            "overlap_moe_expert_parallel_comm",
        )
    ),
    Case("vocabulary", "data=indexed data.prefix=/a", "data=indexed data.prefix=/a model.vocab_size=99"),
    Case("data-flags", f"{ARGS}sft=true", f"{ARGS}sft=true {SCRIPT}"),
    Case("vocabulary", f"data=script {SCRIPT}", f"data=script {SCRIPT} model.vocab_size=99"),
    Case("vocabulary", "model.vocab_size=256", "model.vocab_size=257"),
    *(
        Case(
            "data-files",
            "data=text data.paths=[/a]",
            "data=text data.paths=[/a]",
            MachineFacts(files={"/a": bad}),
            MachineFacts(files={"/a": FileFacts(num_bytes=5)}),
        )
        for bad in UNREADABLE
    ),
    Case(
        "data-files",
        "data=indexed data.prefix=/a",
        bad_facts=MachineFacts(files={"/a.bin": FileFacts(num_bytes=3), "/a.idx": FileFacts(num_bytes=None)}),
    ),
    Case(
        "data-content",
        "data=chat data.paths=[/a]",
        "data=chat data.paths=[/a]",
        MachineFacts(data_problems=(Problem(what="/a line 2 is not JSON."),)),
        # Told once, by data-files.
        MachineFacts(
            files={"/a": FileFacts(num_bytes=0)}, data_problems=(Problem(what="data.paths: /a is empty."),)
        ),
    ),
    Case("mock-data", "data=mock", level=Level.NOTE),
]
