"""Layers in plain torch where Megatron relies on a fused library that is not installed.

The gated delta rule and its convolution come from `fla` (flash-linear-attention), zero-centred norms from
Transformer Engine. What stands in for them computes the same with other rounding, far slower: meant for
rehearsals on CPUs, and for building real models without a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional

from muon_offload_cli.megatron.substitute import Substitutions

GATED_DELTA_NET = "megatron.core.ssm.gated_delta_net"


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm that multiplies by 1 + weight, the weight born as zero; computed in fp32."""

    def reset_parameters(self) -> None:
        """Start as a norm without scale."""
        if self.elementwise_affine:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        scale = 1.0 + self.weight.float()
        return functional.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


def causal_conv1d(
    *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, **_: Any
) -> tuple[torch.Tensor, None]:
    """Convolve each channel over the past, then apply SiLU (`fla.modules.convolution.causal_conv1d`).

    Args:
        x: Batch, sequence, channels.
        weight: Channels, width.
        bias: Channels, or None.
        activation: ``silu`` or ``swish``, the same function; Megatron allows no other.

    Returns:
        A tensor shaped like `x`, and None for the final state, which training does not ask for.
    """
    channels, width = weight.shape
    convolved = functional.conv1d(
        x.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=channels
    )
    return functional.silu(convolved[..., : x.shape[1]]).transpose(1, 2), None


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Scale to length one along `dim` (`fla.modules.l2norm`)."""
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def stand_in_for_fla(stack: Substitutions) -> None:
    """Let Megatron's gated delta net run on torch's operations alone; does nothing where `fla` is there.

    Megatron ships the rule in plain torch for its deterministic mode; here it serves the other mode too.
    """
    package = importlib.import_module(GATED_DELTA_NET)
    names = (GATED_DELTA_NET, f"{GATED_DELTA_NET}.common", f"{GATED_DELTA_NET}.gdn")
    # One module in megatron-core 0.18, a package of two in 0.19.
    modules = [
        importlib.import_module(name) for name in (names if hasattr(package, "__path__") else names[:1])
    ]
    if any(getattr(module, "HAVE_FLA", False) for module in modules):
        return
    rule = next(
        module.torch_chunk_gated_delta_rule
        for module in modules
        if hasattr(module, "torch_chunk_gated_delta_rule")
    )
    stand_ins = {
        "HAVE_FLA": True,
        "causal_conv1d": causal_conv1d,
        "l2norm": l2norm,
        "chunk_gated_delta_rule": rule,
    }
    for module in modules:
        for name, value in stand_ins.items():
            if hasattr(module, name):
                stack.replace(module, name, value)
