"""Cases of all rules, a file for each of config/rules/."""

from __future__ import annotations

from tests.config.rule_cases import (
    architecture,
    checkpoint,
    chunks,
    data,
    directories,
    directory,
    entry_point,
    exclusive,
    family,
    flags,
    machine,
    model,
    numbers,
    pipeline,
    pretrained,
    topology,
    unread,
)
from tests.config.rule_cases.case import Case

CASES: list[Case] = [
    *family.CASES,
    *numbers.CASES,
    *chunks.CASES,
    *exclusive.CASES,
    *checkpoint.CASES,
    *flags.CASES,
    *entry_point.CASES,
    *unread.CASES,
    *topology.CASES,
    *pipeline.CASES,
    *model.CASES,
    *architecture.CASES,
    *pretrained.CASES,
    *data.CASES,
    *machine.CASES,
    *directory.CASES,
    *directories.CASES,
]
