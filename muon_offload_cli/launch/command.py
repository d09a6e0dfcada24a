"""What to run: torchrun's arguments, the environment with its reasons, and both as one script. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.config.probing import CLEARED, python_path
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import shell_word
from muon_offload_cli.launch.folder import RunFolder

WORKER_MODULE = "muon_offload_cli.megatron.worker"
MAX_GPU_RANK_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One environment variable and why it is set, or with None taken away."""

    name: str
    value: str | None
    reason: str


def torchrun_command(
    config: Config, folder: RunFolder, *, python: str, worker: str = WORKER_MODULE
) -> list[str]:
    """Return the argument list that starts every rank of this node.

    One node meets at a port that torchrun itself binds (``--standalone``), so that two runs at once
    cannot choose the same one; several nodes meet at `launcher.master_address`.

    Args:
        config: The resolved configuration, which the rules accept.
        folder: The run's folder, whose paths the worker gets.
        python: Interpreter that runs torchrun and, through it, the ranks.
        worker: Module that runs on each rank.
    """
    return [
        python,
        "-m",
        "torch.distributed.run",
        *_rendezvous(config),
        f"--nproc-per-node={config.launcher.ranks_per_node}",
        # Without a folder of the run's own, torchrun leaves one in the temporary folder for every run.
        f"--log-dir={folder.logs / 'torchrun'}",
        "-m",
        worker,
        str(folder.resolved),
        str(folder.root),
    ]


def _rendezvous(config: Config) -> list[str]:
    launcher = config.launcher
    if launcher.nodes == 1:
        if launcher.master_port is None:
            # Without --local-addr the ranks look up the host's own name, which laptops and
            # containers often cannot resolve.
            return ["--standalone", "--local-addr=127.0.0.1"]
        return ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={launcher.master_port}"]
    return [
        f"--nnodes={launcher.nodes}",
        f"--node-rank={launcher.node_rank}",
        f"--master-addr={launcher.master_address}",
        f"--master-port={launcher.master_port}",
    ]


def environment(config: Config, *, inherited: Mapping[str, str], cores: int, base: Path) -> list[Setting]:
    """Return the variables that the run needs on top of those it inherits, and those it must not inherit.

    Args:
        config: The resolved configuration; `device` is no longer ``auto``.
        inherited: The launcher's environment.
        cores: CPU cores that this node gives the run.
        base: Folder that relative entries of PYTHONPATH start from.
    """
    settings = [
        Setting(
            name="PYTHONUNBUFFERED",
            value="1",
            reason="a rank that is killed leaves its last lines in the log",
        )
    ]
    settings += [
        Setting(name=name, value=None, reason=reason) for name, reason in CLEARED.items() if name in inherited
    ]
    if "OMP_NUM_THREADS" not in inherited:
        share = max(1, cores // config.launcher.ranks_per_node)
        if config.device is Device.cuda:
            share = min(share, MAX_GPU_RANK_THREADS)
        settings.append(
            Setting(name="OMP_NUM_THREADS", value=str(share), reason="the ranks of a node share its cores")
        )
    parallel = config.parallel
    if parallel.tp > 1 or parallel.cp > 1:
        settings.append(
            Setting(
                name="CUDA_DEVICE_MAX_CONNECTIONS",
                value="1",
                reason="Megatron demands it with tensor or context parallelism before Blackwell",
            )
        )
    if config.device is Device.cpu:
        settings.append(
            Setting(
                name="TORCHDYNAMO_DISABLE",
                value="1",
                reason="CPU start-up is three times faster, losses are equal",
            )
        )
    path = python_path(config.megatron.path, inherited.get("PYTHONPATH", ""), base)
    if path:
        reason = (
            "megatron.path goes before the installed package" if config.megatron.path else "as the launcher's"
        )
        settings.append(Setting(name="PYTHONPATH", value=path, reason=reason))
    return settings


def script(
    command: Sequence[str], settings: Sequence[Setting], *, metrics: Path, base: Path, asked: Sequence[str]
) -> str:
    """Write a bash script that a person can paste and edit; the launcher runs this very text.

    It refuses to start where a run has written already: ranks append to their figures.

    Args:
        command: From `torchrun_command`.
        settings: From `environment`.
        metrics: Folder that the ranks write their figures to.
        base: Working directory of the run, which relative paths in the configuration start from.
        asked: The words of the command that the script is made for, which its head shows.
    """
    exports = []
    for setting in settings:
        value = setting.value
        line = f"unset {setting.name}" if value is None else f"export {setting.name}={shell_word(value)}"
        exports += [f"# {setting.reason}", line]
    # One option a line; a value without "=" stays beside its option ("-m module").
    words = [shell_word(word) for word in command]
    lines = [f"exec {words[0]}"]
    for previous, word in itertools.pairwise(words):
        if previous == "-m":
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    taken = f"{metrics.parent} holds a run already; start another with muon-offload train"
    head = [
        "#!/usr/bin/env bash",
        "# " + " ".join(map(shell_word, asked)),
        "set -eu",
        f"cd {shell_word(str(base))}",
        f'if [ -n "$(ls -A {shell_word(str(metrics))})" ]; then',
        f"  echo {shell_word(taken)} >&2",
        "  exit 2",
        "fi",
    ]
    return "\n".join([*head, *exports, " \\\n".join(lines)]) + "\n"


def by_hand(resolved: str, script_text: str, folder: RunFolder) -> str:
    """Return text that does the whole run when it is pasted into a shell or piped into bash.

    Args:
        resolved: The resolved configuration as YAML.
        script_text: From `script`.
        folder: The run's folder, which the text makes.
    """
    made = " ".join(shell_word(str(path)) for path in (folder.logs, folder.metrics, folder.reports))
    mark = "END_OF_RESOLVED_CONFIG"
    return (
        f"mkdir -p {made}\n"
        f"cat > {shell_word(str(folder.resolved))} <<'{mark}'\n{resolved.rstrip()}\n{mark}\n\n{script_text}"
    )
