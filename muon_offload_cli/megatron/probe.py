"""What the Megatron at hand is and has, asked of itself: ``python -m muon_offload_cli.megatron.probe``.

Runs as a process of its own, because importing torch and Megatron takes seconds and must not slow the
launcher down. Prints one line of JSON. Judges by importing the real symbols, never by version strings: a
checkout of Megatron calls itself by the version of the last release.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

INSTALL_MEGATRON = 'pip install "megatron-core==0.19.2"'
INSTALL_OPTIMIZERS = 'pip install "emerging-optimizers==0.3.0"'


@dataclass(kw_only=True, slots=True)
class ProbeAnswer:
    """What was found.

    Attributes:
        megatron_version: As Megatron calls itself; None if it cannot be imported.
        flags: Option strings of Megatron's parser.
        cuda_available: Whether torch sees a GPU.
        num_gpus: How many.
        chunked_offloader: Whether this Megatron brings a chunked optimizer-state offloader of its own.
        problems: What keeps Muon from training here, as ``{"what", "fix"}``.
    """

    megatron_version: str | None = None
    flags: list[str] = field(default_factory=list)
    cuda_available: bool = False
    num_gpus: int = 0
    chunked_offloader: bool = False
    problems: list[dict[str, str]] = field(default_factory=list)


def probe() -> ProbeAnswer:
    """Import what a run needs and say what is missing."""
    import torch

    answer = ProbeAnswer(cuda_available=torch.cuda.is_available(), num_gpus=torch.cuda.device_count())
    _look_at_megatron(answer)
    _look_at_optimizers(answer)
    return answer


def _look_at_megatron(answer: ProbeAnswer) -> None:
    try:
        from megatron.core import package_info
    except ImportError as error:
        answer.problems.append(_problem(f"megatron-core cannot be imported: {error}.", INSTALL_MEGATRON))
        return
    answer.megatron_version = package_info.__version__
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        answer.problems.append(
            _problem(
                f"megatron-core {answer.megatron_version} comes without its training loop: {error}.",
                INSTALL_MEGATRON,
            )
        )
        return
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    answer.flags = sorted(option for action in parser._actions for option in action.option_strings)
    from megatron.core.optimizer import layer_wise_optimizer, optimizer

    if not hasattr(layer_wise_optimizer, "Float16OptimizerWithFloat16Params"):
        answer.problems.append(
            _problem(
                f"megatron-core {answer.megatron_version} wraps layer-wise optimizers in another class than "
                "the one that is taken over.",
                INSTALL_MEGATRON,
            )
        )
    answer.chunked_offloader = hasattr(optimizer, "ChunkedOptimizerStateOffloader")


def _look_at_optimizers(answer: ProbeAnswer) -> None:
    try:
        from emerging_optimizers.orthogonalized_optimizers import (
            OrthogonalizedOptimizer,
            get_muon_scale_factor,
        )
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp
    except ImportError as error:
        answer.problems.append(
            _problem(
                f"emerging-optimizers, which holds Muon, cannot be used: {error}. A package of another name "
                "or a stub may be in its place.",
                INSTALL_OPTIMIZERS,
            )
        )
        return
    if not all(map(callable, (OrthogonalizedOptimizer, get_muon_scale_factor, newton_schulz_tp))):
        answer.problems.append(_problem("emerging-optimizers is a stub.", INSTALL_OPTIMIZERS))
        return
    if answer.megatron_version is None:
        return
    try:
        from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS, TensorParallelMuon
    except ImportError as error:
        answer.problems.append(
            _problem(f"megatron-core {answer.megatron_version} has no Muon: {error}.", INSTALL_MEGATRON)
        )
        return
    if not HAVE_EMERGING_OPTIMIZERS or not issubclass(TensorParallelMuon, OrthogonalizedOptimizer):
        answer.problems.append(
            _problem(
                f"megatron-core {answer.megatron_version} does not accept the installed emerging-optimizers.",
                INSTALL_OPTIMIZERS,
            )
        )


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
