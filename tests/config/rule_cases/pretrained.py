"""Cases of config/rules/pretrained.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muon_offload_cli.config.rules import MachineFacts, PretrainedFacts
from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import Case

HF = f"model=from_hf model.from_hf={Path(__file__).parents[1] / 'hf' / 'qwen3_4b'}"
CHAT = "data.source=chat data.paths=[/d/a.jsonl]"


def pretrained(**changes: Any) -> MachineFacts:
    return MachineFacts(pretrained=PretrainedFacts(**changes))


WITHOUT_WEIGHTS = pretrained(weight_files=0)

CASES = [
    Case("hf-weights", HF, f"{HF} model.hf_weights=false", WITHOUT_WEIGHTS, WITHOUT_WEIGHTS),
    Case("hf-weights", HF, HF, pretrained(missing=("a", "b", "c", "d")), pretrained()),
    Case(
        "hf-weights", HF, f"{HF} model.hf_weights=false", pretrained(bridge=False), pretrained(bridge=False)
    ),
    Case("hf-tokenizer", f"{HF} data=mock", HF, pretrained(tokenizer=False), pretrained(tokenizer=False)),
    Case("hf-tokenizer", f"{HF} data=mock", "data=mock", pretrained(transformers=False), pretrained()),
    Case("hf-tokenizer", f"{HF} {CHAT}", f"{HF} data=stdlib", pretrained(tokenizer=False), pretrained()),
    Case("hf-bytes", HF, f"{HF} data=mock", level=Level.WARNING),
    Case("hf-bytes", f"{HF} {CHAT} model.hf_tokenizer=false", f"{HF} {CHAT}", level=Level.WARNING),
    Case("hf-bytes", HF, f"{HF} model.hf_weights=false", level=Level.WARNING),
    Case("unused-hf-keys", "model.hf_tokenizer=false", f"{HF} model.hf_tokenizer=false"),
]
