"""What a run will do, as label and text: only settings that the chosen path reads. Pure."""

from __future__ import annotations

import shlex

from muon_offload_cli.config.rules.exclusive import NATIVE_OFFLOADERS
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.settings import has_flag
from muon_offload_cli.config.rules.unread import NATIVE_KEYS, keys_read
from muon_offload_cli.config.schema import Config, DataSource, Engine, Verify
from muon_offload_cli.config.vocabulary import tokenizer_folder
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.offload.directories import describe
from muon_offload_cli.units import MIB, format_bytes

_STATE_LIVES = {
    Engine.none: "on the training device (nothing is moved)",
    Engine.host: "in host memory",
    Engine.mapped: "on disk, through file mappings",
    Engine.disk: "on disk",
}

NOTHING_KNOWN = MachineFacts()


def preview(config: Config, folder: RunFolder, facts: MachineFacts = NOTHING_KNOWN) -> list[tuple[str, str]]:
    """Return the lines that are shown before a run starts.

    The recipe's description is not among them: an override may have made it untrue.
    """
    lines = [
        ("recipe", config.recipe),
        ("ranks", _ranks(config)),
        ("model", _model(config)),
        ("data", _data(config)),
        ("training", _training(config)),
        ("optimizer", _optimizer(config)),
        ("muon state", _offload(config, facts)),
    ]
    if config.resume.source is not None:
        lines.append(("resume from", config.resume.source))
    if config.checkpoint.directory is not None:
        lines.append(("checkpoints", _checkpoint(config)))
    if config.megatron.path is not None:
        lines.append(("megatron", str(facts.megatron or config.megatron.path)))
    if config.megatron.entrypoint is not None:
        words = config.megatron.script_args
        lines.append(("entrypoint", shlex.join([config.megatron.entrypoint, *words])))
    if config.megatron.args:
        shown = ", ".join(f"{name}={value}" for name, value in config.megatron.args.items())
        lines.append(("megatron args", shown))
    lines.append(("run folder", str(folder.root)))
    return lines


def _ranks(config: Config) -> str:
    launcher, parallel = config.launcher, config.parallel
    total = launcher.nodes * launcher.ranks_per_node
    text = f"{total} {_plural('rank', total)} on {config.device.name}"
    if launcher.nodes > 1:
        text += f", {launcher.nodes} nodes of {launcher.ranks_per_node} (this is node {launcher.node_rank})"
    sizes = [
        f"{name}={size}"
        for name, size in (
            ("tp", parallel.tp),
            ("pp", parallel.pp),
            ("cp", parallel.cp),
            ("ep", parallel.ep),
            ("etp", parallel.etp or 1),
        )
        if size > 1
    ]
    if parallel.sequence_parallel:
        sizes.append("sequence parallel")
    return _join(text, " ".join(sizes))


def _model(config: Config) -> str:
    model = config.model
    text = f"{model.name}: {model.num_layers} layers, hidden {model.hidden_size}"
    if model.moe.num_experts is not None:
        text += f", {model.moe.num_experts} experts (top {model.moe.topk})"
    if model.from_hf is not None:
        text += f", {'' if model.hf_weights else 'random weights, numbers '}from {model.from_hf}"
    return text


def _data(config: Config) -> str:
    data = config.data
    match data.source:
        case DataSource.stdlib:
            return "the Python standard library's source, as bytes"
        case DataSource.text | DataSource.chat:
            shown = ", ".join(data.paths[:3]) + (f" and {len(data.paths) - 3} more" if data.paths[3:] else "")
            if data.source is DataSource.text:
                return f"text from {shown}, as bytes"
            folder = tokenizer_folder(config)
            tokens = "as bytes" if folder is None else f"with the tokenizer in {folder}"
            return f"prompts and responses from {shown}, {tokens}; the loss is the responses' alone"
        case DataSource.indexed:
            return f"indexed dataset {data.prefix}"
        case DataSource.mock:
            return "mock tokens"
        case DataSource.script:
            return "the script's own"


def _training(config: Config) -> str:
    train = config.train
    return (
        f"{train.steps} {_plural('step', train.steps)} of {train.global_batch} sequences x "
        f"{train.sequence_length} tokens, micro batch {train.micro_batch}, seed {train.seed}"
    )


def _optimizer(config: Config) -> str:
    optimizer = config.optimizer
    text = f"{optimizer.name}, lr={optimizer.lr:g}"
    if optimizer.lr_warmup_steps:
        text += f", {optimizer.lr_warmup_steps} warm-up steps"
    if optimizer.lr_decay_style != "constant":
        text += f", {optimizer.lr_decay_style} decay to {optimizer.min_lr:g}"
    return text


def _offload(config: Config, facts: MachineFacts) -> str:
    offload = config.offload
    parts = []
    read = keys_read(offload.engine, facts)
    for key in read:
        value = getattr(offload, key)
        if (key == "fraction" and value >= 1) or (key == "host_memory_gb" and offload.host_memory_gib == 0):
            continue
        if key == "verify":
            if value is not Verify.off:
                parts.append(f"verify={value.name}")
            continue
        if key in ("chunk_mb", "staging_mb"):
            if key == "staging_mb" and facts.planned.staging_bytes:
                # Rings are no larger than what goes through them.
                value = facts.planned.staging_bytes / config.launcher.ranks_per_node / MIB
            shown = "all at once" if value == 0 else format_bytes(value * MIB)
            parts.append(f"{key.removesuffix('_mb')} {shown}")
        elif key == "directory":
            parts.append(", ".join(value or ["the default directory"]))
            if shared := describe(len(value or ()), config.launcher.ranks_per_node):
                parts.append(shared)
        else:
            parts.append(f"{key}={value}")
    lives = _STATE_LIVES[offload.engine]
    if read is NATIVE_KEYS:
        lives += " of Megatron's own offloader"
    elif offload.engine is Engine.none and any(has_flag(config, flag) for flag in NATIVE_OFFLOADERS):
        lives = "in pinned host memory of Megatron's own offloader"
    return _join(f"engine {offload.engine.name}, {lives}", *parts)


def _checkpoint(config: Config) -> str:
    checkpoint = config.checkpoint
    every = f"every {checkpoint.interval} steps" if checkpoint.interval else "at the end"
    what = "with" if checkpoint.optimizer else "without"
    return f"{checkpoint.directory}, {every}, {what} optimizer state"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
