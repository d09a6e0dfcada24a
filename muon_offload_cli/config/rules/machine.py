"""What the machine at hand has: GPUs, Megatron, and what gathering the facts found out itself."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.chunks import on_cpus
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.family import is_muon
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import has_flag
from muon_offload_cli.config.schema import Config, Device, Engine
from muon_offload_cli.errors import Problem
from muon_offload_cli.units import counted


@rule(name="found", reason="A missing or broken installation is told before anything starts.", machine=True)
def found(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Pass on what gathering the facts found: no Megatron, nowhere to put state."""
    yield from facts.problems


@rule(
    name="muon-installed",
    reason="A missing, old or stub emerging-optimizers would stop every rank at its first import.",
    machine=True,
)
def muon_installed(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse Muon where Megatron and emerging-optimizers cannot build it together."""
    if is_muon(config.optimizer):
        yield from facts.muon_problems


@rule(
    name="megatron-path",
    reason="A folder without Megatron would leave the installed one in its place.",
    machine=True,
)
def megatron_path(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a `megatron.path` that is no Megatron."""
    if facts.megatron_missing:
        yield Problem(
            what=f"megatron.path={config.megatron.path} is no Megatron: it has no "
            f"{' and no '.join(facts.megatron_missing)}.",
            fix="megatron.path=null",
            keys=("megatron.path",),
        )


@rule(
    name="native-offloader",
    reason="Only some versions of Megatron have an offloader of their own.",
    machine=True,
)
def native_offloader(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse Megatron's chunked offloader where the Megatron at hand has none."""
    flag = "chunked_optimizer_state_offload"
    if facts.megatron is None or facts.megatron.chunked_offloader or not has_flag(config, flag):
        return
    if config.offload.engine is Engine.none:
        yield Problem(
            what=f"megatron.args.{flag}: Megatron {facts.megatron.version or ''} has no chunked offloader.",
            fix=f"megatron.args.{flag}=null",
            keys=(f"megatron.args.{flag}",),
            exit_code=3,
        )


@rule(
    name="native-contract",
    reason="The offloader that mapped extends is Megatron's, and Megatron changes it.",
    machine=True,
)
def native_contract(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse ``mapped`` where Megatron's own offloader is another than the one that is known."""
    software = facts.megatron
    if config.offload.engine is Engine.mapped and software is not None and software.offloader_lacks:
        yield Problem(
            what=f"offload.engine=mapped extends the chunked offloader of Megatron {software.version} "
            f"({software.root}), which has changed: it lacks {'; '.join(software.offloader_lacks)}.",
            fix="offload.engine=disk",
            keys=("offload.engine", "megatron.path"),
            exit_code=3,
        )


@rule(name="cuda", reason="device=cuda needs a GPU that torch sees.", machine=True)
def cuda(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse ``device=cuda`` on a machine without CUDA."""
    if config.device is Device.cuda and facts.cuda_available is False:
        yield Problem(
            what="device=cuda, and torch sees no GPU on this machine.",
            fix=on_cpus(config, facts),
            keys=("device",),
            exit_code=3,
        )


def wants_more_gpus(config: Config, facts: MachineFacts) -> bool:
    """Tell whether a run on GPUs has more ranks a node than this machine has GPUs, if it has any."""
    if config.device is Device.cpu or not facts.num_gpus or not facts.cuda_available:
        return False
    return config.launcher.ranks_per_node > facts.num_gpus


@rule(name="gpus-here", reason="Each rank of this node needs a GPU of its own.", machine=True)
def gpus_here(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse more ranks than this machine has GPUs, unless the run is on CPUs."""
    if wants_more_gpus(config, facts):
        ranks, gpus = config.launcher.ranks_per_node, facts.num_gpus
        elsewhere = "a machine with more GPUs, or --rehearse on CPU ranks"
        yield Problem(
            what=f"launcher.ranks_per_node={ranks}, and this machine has {counted(gpus or 0, 'GPU')}. "
            f"{facts.layouts_told}".rstrip(),
            fix=facts.layouts_fix or (elsewhere if facts.layouts_told else on_cpus(config, facts)),
            keys=("launcher.ranks_per_node", "device"),
            exit_code=3,
        )
