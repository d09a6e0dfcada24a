"""What the Megatron at hand is and has, asked of itself: ``python -m muon_offload_cli.megatron.probe``.

Runs as a process of its own, because importing torch and Megatron takes seconds and must not slow the
launcher down. Prints one line of JSON. Judges by importing the real symbols, never by version strings: a
checkout of Megatron calls itself by the version of the last release.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import typing
import warnings
from dataclasses import asdict, dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

from muon_offload_cli.megatron import native_contract
from muon_offload_cli.megatron.release import flag_values, megatron_release

INSTALL_MEGATRON = 'pip install "megatron-core==0.19.2"'
INSTALL_OPTIMIZERS = 'pip install "emerging-optimizers==0.3.0"'

MAX_STEPS = 16
"""Numbers of Newton-Schulz steps that are tried: 1 to this. Published recipes take 5 to 10."""


@dataclass(kw_only=True, slots=True)
class ProbeAnswer:
    """What was found; what could not be asked keeps its default.

    Attributes:
        torch_version: As torch calls itself.
        torch_cuda: CUDA version that torch was built for; None for a build without CUDA.
        cuda_available: Whether torch sees a GPU.
        num_gpus: How many.
        megatron_version: As Megatron calls itself; None if it cannot be imported.
        megatron_root: Folder that it was imported from.
        flags: Option strings of Megatron's parser, with what it takes after each; empty without its training
            loop.
        layer_wise: Whether it has the layer-wise optimizer that is taken over.
        chunked_offloader: Whether it brings a chunked optimizer-state offloader of its own.
        offloader_lacks: What that one lacks of what is relied upon to map its buffers from files.
        transformer_engine: Whether Transformer Engine is installed.
        optimizers_version: Of emerging-optimizers; None if it is not installed under that name.
        newton_schulz: Steps that run, by coefficient type; empty if Muon cannot be used.
        adaptive_muon: Why adaptive Muon cannot be built or stepped; empty if it can, None if not tried.
        problems: What keeps anything from training here, as ``{"what", "fix"}``.
        muon_problems: What keeps Muon from training here.
    """

    torch_version: str = ""
    torch_cuda: str | None = None
    cuda_available: bool = False
    num_gpus: int = 0
    megatron_version: str | None = None
    megatron_root: str | None = None
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    layer_wise: bool = False
    chunked_offloader: bool = False
    offloader_lacks: list[str] = field(default_factory=list)
    transformer_engine: bool = False
    optimizers_version: str | None = None
    newton_schulz: dict[str, list[int]] = field(default_factory=dict)
    adaptive_muon: str | None = None
    problems: list[dict[str, str]] = field(default_factory=list)
    muon_problems: list[dict[str, str]] = field(default_factory=list)


def probe() -> ProbeAnswer:
    """Import what a run needs and say what is missing."""
    import torch

    answer = ProbeAnswer(
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        cuda_available=torch.cuda.is_available(),
        num_gpus=torch.cuda.device_count(),
        transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
    )
    _look_at_megatron(answer)
    _look_at_optimizers(answer)
    return answer


def _look_at_megatron(answer: ProbeAnswer) -> None:
    try:
        from megatron.core import package_info
    except ImportError as error:
        answer.problems.append(_problem(f"megatron-core cannot be imported: {error}.", _package_of(error)))
        return
    version = answer.megatron_version = megatron_release()
    answer.megatron_root = str(package_info.__file__ or "").partition("/megatron/core/")[0] or None
    try:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args  # noqa: F401
        from megatron.training.arguments import parse_and_validate_args  # noqa: F401

        answer.flags = flag_values()
    except ImportError as error:
        what = f"megatron-core {version} comes without the training loop that is used here: {error}."
        answer.problems.append(_problem(what, _package_of(error)))
    try:
        from megatron.core.optimizer import layer_wise_optimizer
        from megatron.core.optimizer.optimizer_config import OptimizerConfig
    except ImportError as error:
        what = f"megatron-core {version} has no layer-wise optimizer: {error}."
        answer.muon_problems.append(_problem(what, _package_of(error)))
        return
    answer.layer_wise = hasattr(layer_wise_optimizer, "Float16OptimizerWithFloat16Params")
    native = native_contract.modules()
    answer.chunked_offloader = native is not None
    answer.offloader_lacks = native_contract.missing_parts(*native, OptimizerConfig) if native else []
    if not answer.layer_wise:
        what = (
            f"megatron-core {version} wraps layer-wise optimizers in another class than the one that is "
            "taken over."
        )
        answer.muon_problems.append(_problem(what, INSTALL_MEGATRON))


def _look_at_optimizers(answer: ProbeAnswer) -> None:
    try:
        answer.optimizers_version = metadata.version("emerging-optimizers")
    except metadata.PackageNotFoundError:
        answer.optimizers_version = None
    named = f"emerging-optimizers{f' {answer.optimizers_version}' if answer.optimizers_version else ''}"
    try:
        from emerging_optimizers.orthogonalized_optimizers import (
            OrthogonalizedOptimizer,
            get_muon_scale_factor,
            muon_utils,
        )
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp
    except ImportError as error:
        what = (
            f"{named}, which holds Muon, cannot be used: {error}. It is missing, too old, or another "
            "package or a stub has its name."
        )
        answer.muon_problems.append(_problem(what, INSTALL_OPTIMIZERS))
        return
    if not all(map(callable, (OrthogonalizedOptimizer, get_muon_scale_factor, newton_schulz_tp))):
        answer.muon_problems.append(_problem(f"{named} is a stub.", INSTALL_OPTIMIZERS))
        return
    answer.newton_schulz = _newton_schulz(muon_utils)
    if not any(answer.newton_schulz.values()):
        what = f"{named} is a stub: none of its Newton-Schulz coefficients runs."
        answer.muon_problems.append(_problem(what, INSTALL_OPTIMIZERS))
        return
    if answer.megatron_version is None:
        return
    try:
        from megatron.core.optimizer import emerging_optimizers as bridge
        from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS, TensorParallelMuon
    except ImportError as error:
        what = f"megatron-core {answer.megatron_version} has no Muon: {error}."
        answer.muon_problems.append(_problem(what, _package_of(error)))
        return
    if not HAVE_EMERGING_OPTIMIZERS or not issubclass(TensorParallelMuon, OrthogonalizedOptimizer):
        what = f"megatron-core {answer.megatron_version} does not accept the installed {named}."
        answer.muon_problems.append(_problem(what, INSTALL_OPTIMIZERS))
        return
    answer.adaptive_muon = _adaptive_muon(bridge)


def _newton_schulz(muon_utils: ModuleType) -> dict[str, list[int]]:
    """Return the steps that run, by coefficient type.

    Releases differ in the types that they know and in the steps that they allow for each; both show only
    when an iteration is run.
    """
    import torch

    runs: dict[str, list[int]] = {}
    for name in typing.get_args(getattr(muon_utils, "NSCoeffT", None)):
        runs[name] = []
        for steps in range(1, MAX_STEPS + 1):
            try:
                muon_utils.newton_schulz(torch.eye(2, 4), steps, name)
            except (ValueError, TypeError, KeyError):
                continue
            runs[name].append(steps)
    return runs


def _adaptive_muon(bridge: ModuleType) -> str | None:
    """Build and step adaptive Muon once; returns what failed, empty if nothing did."""
    import torch

    optimizer_class = getattr(bridge, "TensorParallelAdaptiveMuon", None)
    if optimizer_class is None:
        return "this Megatron has no adaptive Muon"
    weight = torch.nn.Parameter(torch.eye(4))
    weight.grad = torch.eye(4)
    try:
        optimizer_class([weight]).step()
    except (AttributeError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        return str(error) or type(error).__name__
    return ""


def _package_of(error: ImportError) -> str:
    """Return how to install the package that an import of Megatron failed in: it imports Muon's as well."""
    return INSTALL_OPTIMIZERS if (error.name or "").startswith("emerging_optimizers") else INSTALL_MEGATRON


def _problem(what: str, fix: str) -> dict[str, str]:
    return {"what": what, "fix": fix}


def main() -> int:
    """Print the answer; imports may print lines of their own before it."""
    warnings.simplefilter("ignore")
    answer: dict[str, Any] = asdict(probe())
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
