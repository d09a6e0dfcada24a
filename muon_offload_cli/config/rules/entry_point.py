"""A training script of the user's own in place of the built-in loop."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.flags import ours_for
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import file_problems
from muon_offload_cli.config.schema import Config, DataSource
from muon_offload_cli.errors import Problem, override

KEY = "megatron.entrypoint"
WORDS = "megatron.script_args"


@rule(name="entrypoint-file", reason="A mistyped script is told before a GPU starts.", machine=True)
def entrypoint_file(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a script that is missing, empty, unreadable, or a folder."""
    script = config.megatron.entrypoint
    if script is not None and script in facts.files:
        yield from file_problems(
            KEY, script, facts.files[script], otherwise="leave it out for the built-in loop"
        )


@rule(
    name="entrypoint-source",
    reason="A slip in a script is told before every rank has loaded Megatron to find it.",
    machine=True,
)
def entrypoint_source(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a script that Python cannot compile, or that has no statement; nothing of it is run."""
    script = config.megatron.entrypoint
    if script is not None and script in facts.files and facts.files[script].not_python:
        yield Problem(
            what=f"{KEY}: {script} {facts.files[script].not_python}.",
            fix=f"correct the file, or name another one: {KEY}=...",
            keys=(KEY,),
        )


@rule(
    name="entrypoint-checkout",
    reason="Python would import a Megatron beside the script, and the launcher another one.",
    machine=True,
)
def entrypoint_checkout(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Require `megatron.path` to be the Megatron that lies beside the script."""
    beside, path = facts.megatron_beside_script, config.megatron.path
    if beside is None or path == beside:
        return
    yield Problem(
        what=f"{KEY}={config.megatron.entrypoint} lies beside a Megatron of its own, and "
        f"megatron.path={path or 'null'} names another one.",
        fix=override("megatron.path", beside),
        keys=(KEY, "megatron.path"),
    )


@rule(name="script-words", reason="A script's own words go to the script, once.")
def script_words(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse words for a script where there is none, and words that a key of ours gives."""
    words = config.megatron.script_args
    if words and config.megatron.entrypoint is None:
        yield Problem(
            what=f"{WORDS} is set, and without {KEY} nothing reads it.",
            fix=f"{KEY}=/path/to/pretrain.py",
            keys=(WORDS, KEY),
        )
    ours = ours_for(config)
    for word in words:
        key = ours.get(word.partition("=")[0].removeprefix("--").replace("-", "_"))
        if word.startswith("--") and key is not None:
            yield Problem(
                what=f"{WORDS} holds {word[:80]}, which the key {key} gives to the script.",
                fix=f"take it out of {WORDS}, and set {key}",
                keys=(WORDS, key),
            )


@rule(name="data-script", reason="The built-in loop has no data but what its own sources give.")
def data_script(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse ``data=script`` where no script brings data."""
    if config.data.source is DataSource.script and config.megatron.entrypoint is None:
        yield Problem(
            what=f"data.source=script leaves the data to a script, and {KEY} names none.",
            fix="data.source=stdlib",
            keys=("data.source", KEY),
        )
