"""Optimizer families, split as Megatron's own paths are.

Megatron rewrites the optimizer's flags while it parses them (``dist_muon`` becomes ``muon`` with
layer-wise ownership), so these rules look at what the user wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.keys import nearest
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import has_flag, in_range
from muon_offload_cli.config.schema import Config, Engine, OptimizerConfig
from muon_offload_cli.errors import Problem

ADAPTIVE_MUON = "adaptive_muon"
FAMILIES = ("dist_muon", "muon", ADAPTIVE_MUON, "adam")
# What Megatron's parser also takes (megatron/training/arguments.py, --optimizer).
OTHER_FAMILIES = ("soap", "lion", "sgd")

# Values of NSCoeffT in emerging_optimizers/orthogonalized_optimizers/muon_utils.py, without
# "custom", whose coefficients no flag of Megatron can give.
COEFFICIENT_TYPES = ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4")
TP_MODES = ("blockwise", "duplicated", "distributed")
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
DECAY_STYLES = ("constant", "linear", "cosine")


def is_muon(optimizer: OptimizerConfig) -> bool:
    """Tell whether the matrices are Muon's."""
    return optimizer.name in ("dist_muon", "muon", ADAPTIVE_MUON)


def is_layer_wise(optimizer: OptimizerConfig) -> bool:
    """Tell whether data-parallel ranks own whole parameters."""
    return optimizer.name == "dist_muon" or (is_muon(optimizer) and optimizer.layer_wise)


def _as_muon(config: Config, **wanted: str) -> str:
    """Return the words that give the optimizer what is wanted, without what layer-wise Muon refuses."""
    wanted |= {"distributed": "false"} if config.optimizer.distributed else {}
    return " ".join(f"optimizer.{name}={value}" for name, value in wanted.items())


def _as_adam(config: Config) -> str:
    """Return the words that make the run one of resident Adam."""
    optimizer = config.optimizer
    words = {
        "optimizer.name=adam": True,
        "optimizer.distributed=true": not optimizer.distributed,
        "optimizer.layer_wise=false": optimizer.layer_wise,
        "offload.engine=none": config.offload.engine is not Engine.none,
    }
    return " ".join(word for word, needed in words.items() if needed)


@rule(
    name="optimizer-family",
    reason="Only dist_muon, muon and adaptive_muon with layer-wise ownership, and resident Adam have a path.",
)
def known_family(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse optimizers other than the supported families."""
    name = config.optimizer.name
    if name in FAMILIES:
        return
    near = nearest(name, FAMILIES, count=1)
    if name in OTHER_FAMILIES:
        reason = "its state cannot be streamed"
    else:
        reason = "there is no such optimizer in Megatron"
    shown = name if len(name) <= 80 else name[:80] + "..."
    yield Problem(
        what=f"optimizer.name={shown}: {reason}; "
        "dist_muon, muon and adaptive_muon (layer-wise), and adam work.",
        fix=_as_adam(config) if near == ["adam"] else _as_muon(config, name="dist_muon"),
        keys=("optimizer.name",),
    )


@rule(
    name="adaptive-muon",
    reason="Megatron and emerging-optimizers release adaptive Muon apart; some pairs cannot step it.",
    machine=True,
)
def adaptive_muon(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse adaptive Muon where the probe could not step it."""
    broken = facts.megatron.adaptive_muon if facts.megatron is not None else None
    if config.optimizer.name == ADAPTIVE_MUON and facts.megatron is not None and broken:
        installed = f"emerging-optimizers {facts.megatron.optimizers_version or ''}".rstrip()
        yield Problem(
            what=f"optimizer.name={ADAPTIVE_MUON}: the installed {installed} cannot step it under Megatron "
            f"{facts.megatron.version or ''}: {broken}.",
            fix="optimizer.name=dist_muon",
            keys=("optimizer.name",),
            exit_code=3,
        )


@rule(
    name="plain-muon",
    reason="Plain muon builds no layer-wise optimizer, the only owner whose state is streamed.",
)
def plain_muon(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse muon and adaptive_muon without layer-wise ownership."""
    optimizer = config.optimizer
    if not is_muon(optimizer) or is_layer_wise(optimizer):
        return
    if optimizer.distributed:
        what = (
            f"optimizer.distributed=true with optimizer.name={optimizer.name}: Megatron clears that flag for "
            "Muon, and no layer-wise optimizer is asked for."
        )
    else:
        what = (
            f"optimizer.name={optimizer.name} cannot stream its state to disk: without optimizer.layer_wise "
            "it builds no layer-wise optimizer."
        )
    own = optimizer.name == "muon"
    fix = _as_muon(config, name="dist_muon") if own else _as_muon(config, layer_wise="true")
    yield Problem(what=what, fix=fix, keys=("optimizer.name", "optimizer.layer_wise"))


@rule(
    name="muon-distributed",
    reason="Megatron clears use_distributed_optimizer for Muon, so the key would do nothing.",
)
def muon_distributed(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse the distributed optimizer where layer-wise Muon replaces it."""
    if is_layer_wise(config.optimizer) and config.optimizer.distributed:
        yield Problem(
            what=f"optimizer.distributed=true has no effect with optimizer.name={config.optimizer.name}: "
            "Megatron clears it, layer-wise ownership takes its place.",
            fix="optimizer.distributed=false",
            keys=("optimizer.distributed",),
        )


@rule(name="adam-distributed", reason="Adam's path here is Megatron's distributed optimizer.")
def adam_distributed(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Require the distributed optimizer for Adam."""
    if config.optimizer.name == "adam" and not config.optimizer.distributed:
        yield Problem(
            what="optimizer.name=adam needs Megatron's distributed optimizer, "
            "and optimizer.distributed=false.",
            fix="optimizer.distributed=true",
            keys=("optimizer.name", "optimizer.distributed"),
        )


@rule(name="adam-layer-wise", reason="Layer-wise ownership exists for Muon alone.")
def adam_layer_wise(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse layer-wise Adam."""
    if config.optimizer.name == "adam" and config.optimizer.layer_wise:
        yield Problem(
            what="optimizer.layer_wise=true is for Muon, and optimizer.name=adam.",
            fix="optimizer.layer_wise=false",
            keys=("optimizer.layer_wise",),
        )


@rule(name="adam-offload", reason="Adam's state has no streaming path yet; resident Adam trains.")
def adam_offload(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse an offload engine for Adam."""
    if config.optimizer.name == "adam" and config.offload.engine is not Engine.none:
        yield Problem(
            what=f"offload.engine={config.offload.engine.name} with optimizer.name=adam: "
            "offloading Adam's state is not supported yet.",
            fix="offload.engine=none",
            keys=("optimizer.name", "offload.engine"),
        )


@rule(
    name="muon-choices",
    reason="Megatron finds a wrong Newton-Schulz, scale or tensor-parallel mode only at the first step.",
)
def muon_choices(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse values that no version of the optimizer takes."""
    choices = {
        "muon_coefficient_type": COEFFICIENT_TYPES,
        "muon_tp_mode": TP_MODES,
        "muon_scale_mode": SCALE_MODES,
        "lr_decay_style": DECAY_STYLES,
    }
    for name, allowed in choices.items():
        value = getattr(config.optimizer, name)
        if value not in allowed:
            near = nearest(value, allowed, count=1) or list(allowed)
            yield Problem(
                what=f"optimizer.{name}={value} is none of {', '.join(allowed)}.",
                fix=f"optimizer.{name}={near[0]}",
                keys=(f"optimizer.{name}",),
            )


@rule(
    name="newton-schulz",
    reason="Releases of emerging-optimizers differ in coefficients and allowed steps, and say so at step 1.",
    machine=True,
)
def newton_schulz(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a coefficient type or a number of steps that the installed optimizer does not run."""
    optimizer = config.optimizer
    runs = facts.megatron.newton_schulz if facts.megatron is not None else {}
    if not runs or not is_muon(optimizer) or optimizer.muon_coefficient_type not in COEFFICIENT_TYPES:
        return
    steps = runs.get(optimizer.muon_coefficient_type, frozenset())
    tried = max((max(found) for found in runs.values() if found), default=0)
    version = facts.megatron.optimizers_version if facts.megatron is not None else None
    installed = f"the installed emerging-optimizers{f' {version}' if version else ''}"
    if not steps:
        known = [name for name, found in runs.items() if found]
        yield Problem(
            what=f"optimizer.muon_coefficient_type={optimizer.muon_coefficient_type} is none that "
            f"{installed} runs: {', '.join(known)}.",
            fix=f"optimizer.muon_coefficient_type={known[0] if known else 'quintic'}",
            keys=("optimizer.muon_coefficient_type",),
            exit_code=3,
        )
    elif optimizer.muon_num_ns_steps <= tried and optimizer.muon_num_ns_steps not in steps:
        near = min(steps, key=lambda step: abs(step - optimizer.muon_num_ns_steps))
        yield Problem(
            what=f"optimizer.muon_num_ns_steps={optimizer.muon_num_ns_steps} is refused by {installed} for "
            f"optimizer.muon_coefficient_type={optimizer.muon_coefficient_type}.",
            fix=f"optimizer.muon_num_ns_steps={near}",
            keys=("optimizer.muon_num_ns_steps", "optimizer.muon_coefficient_type"),
            exit_code=3,
        )


@rule(name="learning-rate", reason="Megatron's scheduler decays from the peak to the minimum, never upwards.")
def learning_rate(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a minimum above the peak, and a warm-up that is not over before the run is."""
    optimizer, steps = config.optimizer, config.train.steps
    if in_range(optimizer.lr, 0) and in_range(optimizer.min_lr, 0) and optimizer.min_lr > optimizer.lr:
        yield Problem(
            what=f"optimizer.min_lr={optimizer.min_lr:g} is more than optimizer.lr={optimizer.lr:g}.",
            fix="optimizer.min_lr=0.0",
            keys=("optimizer.min_lr", "optimizer.lr"),
        )
    if 1 <= steps <= optimizer.lr_warmup_steps and not has_flag(config, "lr_decay_iters"):
        yield Problem(
            what=f"optimizer.lr_warmup_steps={optimizer.lr_warmup_steps} is not less than "
            f"train.steps={steps}.",
            fix=f"optimizer.lr_warmup_steps={steps - 1}",
            keys=("optimizer.lr_warmup_steps", "train.steps"),
        )
