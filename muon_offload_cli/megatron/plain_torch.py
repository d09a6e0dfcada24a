"""What Megatron needs where neither Transformer Engine nor Apex is installed, on CPUs and GPUs alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from muon_offload_cli.megatron.plain_layers import ZeroCentredRMSNorm, stand_in_for_fla
from muon_offload_cli.megatron.substitute import Substitutions


def has_transformer_engine() -> bool:
    """Whether Megatron finds Transformer Engine and would build its layers from it."""
    from megatron.core.utils import is_te_min_version  # imports nothing of TE itself

    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return bool(is_te_min_version("1.9.0"))


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Make up for missing fused libraries until the context is left."""
    with Substitutions() as stack:
        _allow_more_of_norms(stack)
        stand_in_for_fla(stack)
        _skip_compiling_shipped_helpers(stack)
        yield


def _allow_more_of_norms(stack: Substitutions) -> None:
    """Build torch's norms under sequence parallelism, and zero-centred ones.

    Megatron refuses the former because nothing tags their parameters for the gradient all-reduce over the
    tensor-parallel group; tagged ``sequence_parallel``, ``finalize_model_grads`` treats them like its own.
    It refuses the latter because torch has none.
    """
    from megatron.core.transformer import torch_norm

    class _Untouched:
        """A config that says no to what is made up for here and passes everything else through."""

        def __init__(self, config: Any) -> None:
            self._config = config

        sequence_parallel = False
        layernorm_zero_centered_gamma = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._config, name)

    build = torch_norm.WrappedTorchNorm.__new__

    def build_tagged(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if config.layernorm_zero_centered_gamma and config.normalization != "RMSNorm":
            build(cls, config, *args, **kwargs)  # Megatron's refusal says what is wrong.
        module: Any = build(cls, _Untouched(config), *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            module = ZeroCentredRMSNorm(module.normalized_shape, eps=module.eps)
        if config.sequence_parallel:
            for parameter in module.parameters():
                parameter.sequence_parallel = True
        return cast(torch.nn.Module, module)

    stack.replace(torch_norm.WrappedTorchNorm, "__new__", build_tagged)


def _skip_compiling_shipped_helpers(stack: Substitutions) -> None:
    """The wheel ships the dataset helpers compiled, without the Makefile that Megatron would run."""
    from megatron.core.datasets import utils

    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        return
    stack.replace(utils, "compile_helpers", lambda: None)
