"""Cases of config/rules/checkpoint.py."""

from __future__ import annotations

from tests.config.rule_cases.case import Case, in_folders

CASES = [
    Case(
        "checkpoint-flags",
        "checkpoint.directory=/c megatron.args.async_save=true",
        "megatron.args.async_save=true",
    ),
    Case(
        "checkpoint-numbers",
        "checkpoint.directory=/c checkpoint.keep=0",
        "checkpoint.directory=/c checkpoint.keep=1",
    ),
    Case("checkpoint-numbers", "resume=/c resume.step=0", "resume=/c resume.step=1"),
    Case(
        "experts-saved-twice",
        "checkpoint.directory=/c parallel.ep=1 parallel.etp=1",
        "checkpoint.directory=/c parallel.ep=1 parallel.etp=2",
    ),
    Case("checkpoint-nowhere", "resume=auto", "resume=auto checkpoint.directory=/c"),
    Case("checkpoint-nowhere", "resume=4", "resume=/c"),
    Case("weights-only", "resume.weights_only=true", "resume.weights_only=true resume=/c"),
    Case(
        "weights-only",
        "resume.weights_only=true resume=auto checkpoint.directory=/c",
        "resume.weights_only=true resume=/d checkpoint.directory=/c",
    ),
    Case("weights-only", "resume.weights_only=true resume=/c checkpoint.directory=/c"),
    Case("checkpoint-space", "", "", in_folders(free_bytes=999), in_folders(free_bytes=1000)),
]
