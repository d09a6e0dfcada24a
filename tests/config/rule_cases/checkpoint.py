"""Cases of config/rules/checkpoint.py."""

from __future__ import annotations

from dataclasses import replace

from muon_offload_cli.checkpoints.room import Coming
from muon_offload_cli.config.rules import MachineFacts, PlannedFacts
from tests.config.rule_cases.case import Case, in_folders, on_disk

SAVED = "checkpoint.directory=/c"
KEEP_1 = f"checkpoint.keep=1 {SAVED}"


def _saving(free_bytes: int, saves: int, standing: int = 0, freed: int = 0) -> MachineFacts:
    coming = Coming(saves=saves, standing=standing, freed=freed)
    planned = PlannedFacts(checkpoint_bytes=1000, checkpoints=coming)
    return replace(in_folders(free_bytes=free_bytes), planned=planned)


def _beside_state(free_bytes: int) -> MachineFacts:
    facts = on_disk(device=0, free_bytes=free_bytes)
    planned = replace(facts.planned, checkpoint_bytes=1000)
    return replace(facts, folders=in_folders(free_bytes=free_bytes, device=0).folders, planned=planned)


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
    Case(
        "checkpoint-apart",
        "checkpoint.directory=/c/a run.directory=/c/./a",
        "checkpoint.directory=/c run.directory=/c/a",
    ),
    Case(
        "checkpoint-apart",
        "checkpoint.directory=r/saved run.directory=r",
        "checkpoint.directory=r-saved run.directory=r",
    ),
    Case("weights-only", "resume.weights_only=true", "resume.weights_only=true resume=/c"),
    Case(
        "weights-only",
        "resume.weights_only=true resume=auto checkpoint.directory=/c",
        "resume.weights_only=true resume=/d checkpoint.directory=/c",
    ),
    Case("weights-only", "resume.weights_only=true resume=/c checkpoint.directory=/c"),
    Case("checkpoint-space", "", "", in_folders(free_bytes=999), in_folders(free_bytes=1000)),
    Case("checkpoint-space", SAVED, SAVED, _saving(4999, saves=5), _saving(5000, saves=5)),
    Case("checkpoint-space", KEEP_1, KEEP_1, _saving(1999, saves=5), _saving(2000, saves=5)),
    # The one that the run goes on from has its room.
    Case("checkpoint-space", KEEP_1, KEEP_1, _saving(999, 5, standing=1), _saving(1000, 5, standing=1)),
    # What an interrupted save left makes room for the next one.
    Case("checkpoint-space", KEEP_1, KEEP_1, _saving(299, 5, 1, freed=700), _saving(300, 5, 1, freed=700)),
    Case("checkpoint-space", "", "", _beside_state(1999), _beside_state(2000)),
]
