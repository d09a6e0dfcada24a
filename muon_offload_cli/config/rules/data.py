"""Training data: named, there, and of the form that its source reads."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

from muon_offload_cli.config.keys import FREE_PREFIX
from muon_offload_cli.config.locations import from_home
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import file_problems, has_flag
from muon_offload_cli.config.schema import Config, DataSource
from muon_offload_cli.config.vocabulary import BYTE_SOURCES, BYTE_VOCABULARY, tokenizer_folder
from muon_offload_cli.errors import Level, Problem, override

INDEXED_SUFFIXES = (".bin", ".idx")

NAMED_FILES = (DataSource.text, DataSource.chat)
"""Sources that read `data.paths`."""

UNSUPPORTED_FLAGS = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "overlap_moe_expert_parallel_comm",
)
"""Flags of Megatron whose batches or schedules the built-in training data does not know."""


def data_files(config: Config) -> list[str]:
    """Return the files that the chosen source reads, as the user gave them."""
    if config.data.source in NAMED_FILES:
        return list(config.data.paths)
    if config.data.source is DataSource.indexed and config.data.prefix:
        return [config.data.prefix + suffix for suffix in INDEXED_SUFFIXES]
    return []


@rule(name="data-named", reason="Sources of the user's own read what the user names.")
def data_named(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Require paths for text and chats, and a prefix for indexed data."""
    if config.data.source in NAMED_FILES and not config.data.paths:
        suffix = "jsonl" if config.data.source is DataSource.chat else "txt"
        yield Problem(
            what=f"data.source={config.data.source.name}, and data.paths names no file.",
            fix=f"data.paths=[/path/to/file.{suffix}]",
            keys=("data.source", "data.paths"),
        )
    if config.data.source is DataSource.indexed and not config.data.prefix:
        yield Problem(
            what="data.source=indexed, and data.prefix is not set.",
            fix="data.prefix=/path/without/suffix",
            keys=("data.source", "data.prefix"),
        )


@rule(
    name="vocabulary",
    reason="Only byte tokens have a vocabulary that the program itself knows.",
    machine=False,
)
def vocabulary(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Require a vocabulary size where the data source does not give one, and room for all bytes."""
    size = config.model.vocab_size
    if size is None:
        if config.data.source in (DataSource.indexed, DataSource.script):
            yield Problem(
                what=f"data.source={config.data.source.name} needs model.vocab_size: nothing else tells it.",
                fix="model.vocab_size=32000",
                keys=("model.vocab_size", "data.source"),
            )
    elif config.data.source in BYTE_SOURCES and not tokenizer_folder(config) and 1 <= size < BYTE_VOCABULARY:
        yield Problem(
            what=f"model.vocab_size={size} is too small for byte tokens: 256 bytes and an end of document.",
            fix="model.vocab_size=null",
            keys=("model.vocab_size", "data.source"),
        )


@rule(name="data-files", reason="A missing or empty file is found before a GPU starts.", machine=True)
def files_exist(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse files that are missing, empty, unreadable, or folders."""
    key = "data.paths" if config.data.source in NAMED_FILES else "data.prefix"
    for path in data_files(config):
        found = facts.files.get(path)
        if found is not None:
            yield from file_problems(key, path, found, otherwise="take data=stdlib")


@rule(
    name="data-content",
    reason="What no rank could read is found before ranks start: of a jsonl file the first 16 MiB here, all "
    "of it before training begins.",
    machine=True,
)
def data_content(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse lines that are no JSON or lack what the source needs, and damaged indexed pairs."""
    known = {path: facts.files[path] for path in data_files(config) if path in facts.files}
    refused = [path for path, found in known.items() if any(file_problems("", path, found, otherwise=""))]
    if refused and config.data.source is DataSource.indexed:
        return
    place = facts.working_directory or Path("/")
    told = tuple(f"data.paths: {place / from_home(path)} " for path in refused)
    yield from (problem for problem in facts.data_problems if not problem.what.startswith(told))


@rule(name="mock-data", reason="Invented tokens teach nothing, whatever the loss seems to say.")
def mock_data(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Note that mock data is not for training."""
    if config.data.source is DataSource.mock:
        yield Problem(
            what="data.source=mock: the tokens are invented, good for timing alone.",
            fix="data.source=stdlib",
            keys=("data.source",),
            level=Level.NOTE,
        )


@rule(name="data-flags", reason="These ask for batches or schedules that the built-in data does not have.")
def data_flags(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse flags that the built-in training data cannot serve; a script may have other data."""
    for flag in UNSUPPORTED_FLAGS:
        if has_flag(config, flag) and config.megatron.entrypoint is None:
            yield unsupported(flag)


def unsupported(flag: str) -> Problem:
    """Return what is wrong with one of `UNSUPPORTED_FLAGS`."""
    key = FREE_PREFIX + flag
    return Problem(
        what=f"{key} does not work with the built-in training data.", fix=f"{key}=null", keys=(key,)
    )


@rule(name="cache-absolute", reason="Ranks may start in other folders than the launcher.")
def cache_absolute(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a relative folder for prepared data."""
    key, given = "data.cache_directory", config.data.cache_directory
    if given and not given.startswith(("/", "~")):
        place = facts.working_directory
        yield Problem(
            what=f"{key}={given} is no absolute path.",
            fix=f"{key}=/absolute/folder" if place is None else override(key, place / given),
            keys=(key,),
        )
